-- A rate is what was served while there was work, so that a minute with little work does not look like a slow one.

alter table rates add column
    busy_ms bigint not null default 0;
alter table rates add column
    call_ms bigint not null default 0;
alter table rates add column
    last_at bigint not null default 0;
