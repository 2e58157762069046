-- What a job cost so far, how many calls a key may have at once, and what interactive calls used.

alter table jobs add column
    cost_nano bigint not null default 0;
alter table keys add column
    parallel_max bigint not null default 0;

create table usage_interactive (
    day bigint not null,
    tenant_id text not null,
    key_id text not null,
    model text not null,
    deployment text not null,
    team text not null,
    user_name text not null,
    calls bigint not null,
    input_tokens bigint not null,
    cached_tokens bigint not null,
    output_tokens bigint not null,
    reasoning_tokens bigint not null,
    input_nano bigint not null,
    cached_nano bigint not null,
    output_nano bigint not null,
    primary key (day, tenant_id, key_id, model, deployment)
);

create table usage_writers (
    id text primary key,
    flush_number bigint not null,
    wrote_at bigint not null
);
