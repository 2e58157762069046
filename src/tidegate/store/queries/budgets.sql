-- Shared limits: ledgers of budgets, slots in flight, and limits that upstreams report.

-- budgets_lock --
-- The ledgers of a few budgets, locked in order of their ids so that processes never deadlock. The
-- time is read after the locks, so that a later transaction of a row has a later time.
with locked as (
    select id, ledger from budgets
    where id in (:id_0, :id_1, :id_2, :id_3, :id_4, :id_5, :id_6, :id_7)
    order by id
    /*! for update */
)
select id, ledger, now_ms() as now from locked;

-- budgets_look --
-- Ledgers without locks, for a look that takes nothing.
select id, ledger from budgets where id in (:id_0, :id_1, :id_2, :id_3, :id_4, :id_5, :id_6, :id_7);

-- budget_begin --
-- A row is created in a separate transaction, so that transactions which lock it find it and no
-- count is overwritten.
insert into budgets (id, bound, name, ledger, used_at, empty_at)
values (:id, :bound, :name, :ledger, now_ms(), now_ms())
on conflict (id) do nothing;

-- budget_write --
-- Used only under the lock of budgets_lock.
update budgets set ledger = :ledger, used_at = now_ms(), empty_at = :empty_at where id = :id;

-- holders_living --
-- The processes whose calls in flight may still be settled: living ones, and those whose slices
-- were not reclaimed yet, so that their calls are neither known nor repeated.
select w.id from workers w
where w.state = 'alive' or exists (select 1 from slices s where s.worker_id = w.id and s.state = 'leased');

-- budgets_prune --
-- A budget in which nothing counts any more is not needed. The lifetime budget of a job ends with
-- the job.
with picked as (
    select b.id as picked_id from budgets b
    where b.used_at < now_ms() - :idle_ms
        and (b.empty_at < now_ms() or (b.bound = 'job' and not exists (select 1 from jobs j where j.id = b.name)))
    order by b.id
    limit :count_max /*! for update skip locked */
)
delete from budgets where id in (select picked_id from picked);

-- slots_anchor --
-- One row for each name without a holder. A transaction that shares the name's slots locks it.
insert into slots (name, worker_id, held, wanted, reported_at) values (:name, '', 0, 0, now_ms()) on conflict (name, worker_id) do nothing;

-- slots_lock --
select name, now_ms() as now from slots
where worker_id = '' and name in (:id_0, :id_1, :id_2, :id_3, :id_4, :id_5, :id_6, :id_7)
order by name
/*! for update */;

-- worker_alive --
select 1 from workers where id = :id and state = 'alive';

-- slots_held --
-- The slots of each process. One that was declared gone has none; one that is only late still has
-- them.
select s.name, s.worker_id, s.held, s.wanted from slots s
join workers w on w.id = s.worker_id and w.state = 'alive'
where s.name in (:id_0, :id_1, :id_2, :id_3, :id_4, :id_5, :id_6, :id_7);

-- slot_write --
insert into slots (name, worker_id, held, wanted, reported_at) values (:name, :worker_id, :held, :wanted, now_ms())
on conflict (name, worker_id) do update set held = excluded.held, wanted = excluded.wanted, reported_at = excluded.reported_at;

-- slots_prune --
-- Remove rows of processes that are gone, and rows without a holder that were not used for long.
with picked as (
    select s.name as picked_name, s.worker_id as picked_worker from slots s
    where (s.worker_id <> '' and not exists (select 1 from workers w where w.id = s.worker_id and w.state = 'alive'))
        or (s.worker_id = '' and s.reported_at < now_ms() - :idle_ms
            and not exists (select 1 from slots other where other.name = s.name and other.worker_id <> ''))
    order by s.name, s.worker_id
    limit :count_max /*! for update of s skip locked */
)
delete from slots where (name, worker_id) in (select picked_name, picked_worker from picked);

-- discovered_put --
-- A part that was not reported this time keeps its last value.
insert into discovered_limits (deployment, requests, tokens, reported_at) values (:deployment, :requests, :tokens, now_ms())
on conflict (deployment) do update set
    requests = coalesce(excluded.requests, discovered_limits.requests),
    tokens = coalesce(excluded.tokens, discovered_limits.tokens),
    reported_at = excluded.reported_at;

-- discovered_list --
select deployment, requests, tokens from discovered_limits where reported_at > now_ms() - :keep_ms;

-- discovered_prune --
delete from discovered_limits where reported_at <= now_ms() - :keep_ms;

-- store_name_put --
insert into meta (name, value) values ('store_name', :value) on conflict (name) do nothing;

-- store_name_get --
select value from meta where name = 'store_name';
