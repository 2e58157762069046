-- Canaries: a sample of a job's items that runs alone, and what happens when it is done.

-- job_canary_put --
update jobs set canary_items = :items, canary_ppm = :error_ppm, canary_then = :then_do, canary_state = 'running' where id = :id;

-- job_canary_begin --
-- The job starts: so many of its items are the sample. No row: its caller wants no canary any more.
update jobs set canary_items = :items where id = :id and canary_state = 'running' returning id;

-- job_canary_set --
update jobs set canary_state = :state where id = :id and canary_state in ('running', 'waiting');

-- slices_hold_back --
-- What is not of the sample rests until it is let go.
update slices set ready_at = :forever where job_id = :job_id and first >= :first and state = 'ready';

-- slices_let_go --
update slices set ready_at = now_ms() where job_id = :job_id and state = 'ready' and ready_at = :forever;

-- job_flows --
-- The flows that a job's open models belong to.
select model, share_owner from job_models where job_id = :job_id and state in ('open', 'held') order by model, share_owner;
