-- How the store's time is read from the machine's clock, and when somebody last looked at it: see core/store_clock.py. One row.
create table clock (
    id bigint primary key,
    ticked_at bigint not null,
    behind_ms bigint not null,
    from_ms bigint not null,
    since_ms bigint not null,
    stepped_at bigint not null,
    boot_id text not null,
    boot_ms bigint not null
);
