-- What was used and what it cost, by day: record adds to it in the transaction that makes an outcome, so nothing counts twice.

create table usage (
    day bigint not null,
    job_id text not null,
    model text not null,
    deployment text not null,
    tenant_id text not null,
    team text not null,
    user_name text not null,
    key_id text not null,
    calls bigint not null,
    input_tokens bigint not null,
    cached_tokens bigint not null,
    output_tokens bigint not null,
    reasoning_tokens bigint not null,
    input_nano bigint not null,
    cached_nano bigint not null,
    output_nano bigint not null,
    primary key (day, job_id, model, deployment)
);
create index usage_by_tenant on usage (tenant_id, day);
