-- A key that is deleted works no more and is shown nowhere. Its row stays: what its last calls used is its team's, and its id never comes back.
-- `changed_at` is when it was last changed, revoked or deleted: who puts its jobs to rest then may not have heard of it.

alter table keys add column
    deleted_at bigint;
alter table keys add column
    changed_at bigint not null default 0;
