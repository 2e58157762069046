-- Inputs are ingested in a fair order: by bytes between tenants, small ones first within one. A job that an older version creates meanwhile
-- counts as one with a large input.

alter table jobs add column
    ingest_bytes bigint not null default 1048576;

update jobs set ingest_bytes = coalesce((select f.size_bytes + 512 * f.line_count from files f where f.id = jobs.input_file_id), 0)
where state = 'validating';

create index jobs_to_ingest on jobs (tenant_id, (ingest_bytes + 100 * created_at), id) where state = 'validating';
create index jobs_ingesting on jobs (step_worker_id) where state = 'validating' and step_worker_id is not null;

create table ingest_clocks (
    lane text primary key,
    clock bigint not null
);

create table ingest_turns (
    lane text not null,
    tenant_id text not null,
    place bigint not null,
    primary key (lane, tenant_id)
);
create index ingest_turns_by_place on ingest_turns (lane, place);
