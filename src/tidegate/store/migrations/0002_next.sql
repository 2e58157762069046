-- compatible_from: 1

alter table rates add column input_tokens bigint not null default 0;
alter table rates add column servers text not null default '';
alter table rates add column unit_squares double precision not null default 0;
alter table rates add column unit_ms double precision not null default 0;
alter table rates add column unit_tokens double precision not null default 0;

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
/*sqlite:
create trigger audit_unchanged before update on audit when old.number is not null
begin
    select raise(abort, 'entries of the audit are never changed');
end;
create trigger audit_kept before delete on audit when old.number > coalesce((select pruned_number from audit_chain where id = 1), 0)
begin
    select raise(ignore);
end;
create trigger audit_chain_goes_on before update on audit_chain
when new.number < old.number or new.pruned_number < old.pruned_number or new.pruned_number > new.number
begin
    select raise(abort, 'the chain of the audit only goes on');
end;
create trigger audit_chain_kept before delete on audit_chain
begin
    select raise(abort, 'the chain of the audit is kept');
end;
*/
/*postgresql:
create function keep_audit() returns trigger language plpgsql as $$
begin
    if tg_op = 'TRUNCATE' then
        raise exception 'the audit is kept';
    end if;
    if old.number is null then
        return case tg_op when 'DELETE' then old else new end;
    end if;
    if tg_op = 'UPDATE' then
        raise exception 'entries of the audit are never changed';
    end if;
    if old.number <= (select pruned_number from audit_chain where id = 1) then
        return old;
    end if;
    raise warning 'entries of the audit are removed by retention alone';
    return null;
end $$;
create function keep_audit_chain() returns trigger language plpgsql as $$
begin
    if tg_op <> 'UPDATE' then
        raise exception 'the chain of the audit is kept';
    end if;
    if new.number < old.number or new.pruned_number < old.pruned_number or new.pruned_number > new.number then
        raise exception 'the chain of the audit only goes on';
    end if;
    return new;
end $$;
create trigger audit_kept before update or delete on audit for each row execute function keep_audit();
create trigger audit_not_emptied before truncate on audit for each statement execute function keep_audit();
create trigger audit_chain_kept before update or delete on audit_chain for each row execute function keep_audit_chain();
create trigger audit_chain_not_emptied before truncate on audit_chain for each statement execute function keep_audit_chain();
*/
create table ended_sessions (
    nonce text primary key,
    ends_at bigint not null
);
alter table uploads add column md5 text;
create index webhook_deliveries_endpoint_turn on webhook_deliveries (tenant_id, endpoint_id, due_at, event_id) where state = 'pending';
