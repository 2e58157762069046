-- What a key may use beside models, its own limits, and the secret that it had before it was rotated.

alter table keys add column
    resources text not null default '';
alter table keys add column
    limits text;
alter table keys add column
    old_hash bytea;
alter table keys add column
    old_until bigint;
