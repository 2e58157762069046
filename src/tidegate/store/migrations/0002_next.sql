-- compatible_from: 1

alter table rates add column input_tokens bigint not null default 0;
alter table rates add column servers text not null default '';

alter table workers add column share_owner text not null default '';
alter table workers add column servers text not null default '';

alter table jobs add column final_cost_nano bigint;
alter table jobs add column final_failed_ppm bigint;
alter table jobs add column unsent_count bigint not null default 0;
update jobs set final_cost_nano = cost_nano, final_failed_ppm = case when item_count > 0 then 1000000 * failed_count / item_count end
where state in ('completed', 'failed', 'expired', 'cancelled');
create index jobs_by_deadline on jobs (expires_at, id)
    where kind = 'batch' and state in ('validating', 'in_progress', 'cancelling', 'finalizing');
create index jobs_by_size on jobs (item_count, id /*sqlite: , tenant_id, created_at, words, errors */) where kind = 'batch';
create index jobs_by_cost on jobs (final_cost_nano, id /*sqlite: , tenant_id, created_at, words, errors */)
    where kind = 'batch' and final_cost_nano > 0;
create index jobs_by_failed on jobs (final_failed_ppm, id) where kind = 'batch' and final_failed_ppm > 0;
create index files_stored on files (tenant_id, size_bytes) where state = 'ready' and purpose <> 'whole';

create table list_places (
    id text primary key,
    tenant_id text not null,
    created_at bigint not null,
    deleted_at bigint not null,
    deadline_at bigint not null default 0,
    item_count bigint not null default 0,
    failed_ppm bigint not null default 0,
    cost_nano bigint not null default 0
);
create index list_places_by_age on list_places (deleted_at);
alter table audit add column address text;
alter table audit add column number bigint;
alter table audit add column previous_hash text;
alter table audit add column hash text;
create unique index audit_by_number on audit (number) where number is not null;
create index audit_unchained on audit (happened_at, id) where number is null;
create table audit_chain (
    id bigint primary key,
    number bigint not null,
    hash text not null,
    pruned_number bigint not null,
    pruned_hash text not null
);
create table ended_sessions (
    nonce text primary key,
    ends_at bigint not null
);
alter table uploads add column md5 text;
