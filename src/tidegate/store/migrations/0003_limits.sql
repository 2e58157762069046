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

-- What calls each process has out at deployments that batch shares with others, and why its tide stands as it does; told again and again.
create table presence (
    deployment text not null,
    worker_id text not null,
    workers bigint not null,
    calls bigint not null,
    interactive bigint not null,
    interactive_awaiting bigint not null,
    has_gateway bigint not null,
    why text not null,
    told_at bigint not null,
    primary key (deployment, worker_id)
);

-- How often an item's call was taken back for an interactive one: at most twice.
alter table attempts add column
    hand_backs bigint not null default 0;
