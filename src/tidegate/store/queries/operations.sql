-- Operations: one action on all jobs that match a filter. The searches for these jobs are in
-- jobs.sql.

-- operation_put --
-- An operation changes no job that was created after it, such as the jobs of its own retries.
with moment as materialized (select now_ms() as ms)
insert into operations (
    id, actor, action, scope, state, created_at, cursor_at, cursor_id, matched_jobs, matched_items, matched_tokens, matched_nano, matched_due,
    matched_due_soon, done_count, failed_count
)
values (
    :id, :actor, :action, :scope, 'running', (select ms from moment), (select ms from moment), '', :jobs, :items, :tokens, :nano, :first_due,
    :due_soon, 0, 0
)
on conflict (id) do nothing;

-- operation_get --
select * from operations where id = :id;

-- operation_page --
select * from operations
where created_at < :created_at or (created_at = :created_at and id < :id)
order by created_at desc, id desc
limit :count_max;

-- operation_waiting --
-- The oldest operation that this worker has, or that no living worker has.
select o.id from operations o
where o.state = 'running' and (o.worker_id is null or o.worker_id = :worker_id or not exists (
    select 1 from workers w where w.id = o.worker_id and w.state = 'alive' and w.alive_until > now_ms()))
order by o.created_at, o.id
limit 1;

-- operation_take --
update operations set worker_id = :worker_id
where id = :id and state = 'running' and (worker_id is null or worker_id = :worker_id or not exists (
    select 1 from workers w where w.id = operations.worker_id and w.state = 'alive' and w.alive_until > now_ms()))
returning id;

-- change_begin --
-- One job of a step may refuse its change without an effect on the others.
savepoint job_change;

-- change_undo --
rollback to savepoint job_change;

-- flow_halt --
-- A step of an operation locks the flows of all its jobs, in order, before it wakes the first.
select served from flows where model = :model and share_owner = :share_owner /*! for update */;

-- operation_advance --
-- Count the jobs of a step, each only once: the operation must not have passed the last of them
-- yet, and its row is locked until the commit.
update operations set cursor_at = :created_at, cursor_id = :job_id, done_count = done_count + :done, failed_count = failed_count + :failed,
    last_failure = coalesce(cast(:failure as text), last_failure)
where id = :id and state = 'running' and worker_id = :worker_id
    and (cursor_at > :created_at or (cursor_at = :created_at and cursor_id > :job_id))
returning id;

-- operation_end --
-- moves: operations: running -> completed
update operations set state = 'completed', ended_at = now_ms() where id = :id and state = 'running' and worker_id = :worker_id
returning id;

-- operation_cancel --
-- moves: operations: running -> cancelled
update operations set state = 'cancelled', ended_at = now_ms() where id = :id and state = 'running' returning id;

-- operation_cursor --
-- The place where a page begins. Pruned operations still have one.
select created_at, id from operations where id = :id
union all
select created_at, id from list_places where tenant_id = '' and id = :id;

-- operation_place_put --
insert into list_places (id, tenant_id, created_at, deleted_at) values (:id, '', :created_at, now_ms()) on conflict (id) do nothing;

-- operations_prune --
delete from operations where ended_at < now_ms() - :keep_ms returning id, created_at;
