-- Shared limits: budgets, slots in flight, and what deployments told of theirs.

-- What is counted of each budget (`bound`:`name`), all of its periods in one packed ledger. `empty_at` is when nothing in it counts any
-- more. Locked in order of id, in transactions that lock nothing else. No index but the key: what changes all the time is in none.
create table budgets (
    id text primary key,
    bound text not null,
    name text not null,
    ledger bytea not null,
    used_at bigint not null,
    empty_at bigint not null
);

-- How many calls each process may have in flight per deployment, and how many it wants. The row of worker '' is the name's lock.
create table slots (
    name text not null,
    worker_id text not null,
    held bigint not null,
    wanted bigint not null,
    told_at bigint not null,
    primary key (name, worker_id)
);

-- What deployments said of their own limits per minute.
create table discovered_limits (
    deployment text primary key,
    requests bigint,
    tokens bigint,
    told_at bigint not null
);
