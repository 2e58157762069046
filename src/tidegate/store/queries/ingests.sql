-- Ingest: which inputs are read next. A lane's clock and the tenants' places on it count bytes
-- (core/input/turns.py).

-- jobs_waiting_ingest --
-- The inputs of a lane that no worker ingests now.
select id from jobs
where state = 'validating' and closing is null and step_not_before <= now_ms() and ingest_bytes >= :bytes_min and ingest_bytes <= :bytes_max
    and (step_worker_id is null or not exists (select 1 from workers w where w.id = step_worker_id and w.state = 'alive'))
limit :count_max;

-- ingest_clock_hold --
-- Lock the clock of a lane: processes choose one at a time, so that all use the same places.
insert into ingest_clocks (lane, clock) values (:lane, 0)
on conflict (lane) do update set clock = ingest_clocks.clock
returning clock;

-- ingest_taken --
-- The jobs that this token got before. The call is repeated if the answer to its commit was lost.
select id from jobs where state = 'validating' and step_worker_id = :worker_id and step_token = :token order by id;

-- part owner_of_worker --
-- The share owner that this worker works for; empty for a worker of all.
coalesce((select w.share_owner from workers w where w.id = :worker_id), '');

-- ingest_tenants --
-- The tenants with a waiting input in this lane, in the order of its clock. Tenants at the same
-- place are in the order of their inputs' lowest rank. Each tenant is found by one step in the
-- index.
with recursive waiting (tenant_id) as (
    select min(j.tenant_id) from jobs j where j.state = 'validating'
    union all
    select (select min(j.tenant_id) from jobs j where j.state = 'validating' and j.tenant_id > w.tenant_id)
    from waiting w where w.tenant_id is not null
),
ranked as (
    select w.tenant_id, coalesce(t.place, 0) as place, (
        select j.ingest_bytes + 100 * j.created_at from jobs j
        where j.state = 'validating' and j.tenant_id = w.tenant_id and j.closing is null and j.step_not_before <= now_ms()
            and j.ingest_bytes >= :bytes_min and j.ingest_bytes <= :bytes_max and {owner_of_worker} in ('', j.share_owner)
            and (j.step_worker_id is null or not exists (select 1 from workers a where a.id = j.step_worker_id and a.state = 'alive'))
        order by j.ingest_bytes + 100 * j.created_at
        limit 1
    ) as first_rank
    from waiting w
    left join ingest_turns t on t.lane = :lane and t.tenant_id = w.tenant_id
    where w.tenant_id is not null
)
select tenant_id, place from ranked
where first_rank is not null
order by case when place > cast(:clock as bigint) then place else cast(:clock as bigint) end, first_rank
limit :tenants_max;

-- ingest_candidates --
-- The next inputs of one tenant, small ones first. An input gains 100 bytes for each millisecond
-- that it waits, so that none waits for ever.
select id, ingest_bytes, ingest_bytes + 100 * created_at as ingest_rank from jobs
where state = 'validating' and tenant_id = :tenant_id and closing is null and step_not_before <= now_ms()
    and ingest_bytes >= :bytes_min and ingest_bytes <= :bytes_max and {owner_of_worker} in ('', share_owner)
    and (step_worker_id is null or not exists (select 1 from workers w where w.id = step_worker_id and w.state = 'alive'))
order by ingest_bytes + 100 * created_at, id
limit :count_max;

-- ingest_take --
-- One process at a time ingests a job. Its right to do so ends with its heartbeat.
update jobs set step_token = :token, step_worker_id = :worker_id
where id = :id and state = 'validating' and closing is null and step_not_before <= now_ms()
    and (step_worker_id is null or not exists (select 1 from workers w where w.id = step_worker_id and w.state = 'alive'))
    and exists (select 1 from workers w where w.id = :worker_id and w.state = 'alive')
returning id;

-- ingest_source --
-- The facts about a job that its ingest needs. An uploaded file is one extent.
select j.*, coalesce(f.sha256, '') as input_sha256, e.blob_id as input_blob_id, coalesce(t.name, '') as tenant_name,
    k.models as key_models, k.resources as key_resources
from jobs j
left join files f on f.id = j.input_file_id
left join extents e on e.file_id = j.input_file_id and e.at = 0
left join tenants t on t.id = j.tenant_id
left join keys k on k.id = j.key_id and k.deleted_at is null
where j.id = :id;

-- ingest_more --
-- The files after the first of an input that is made of several.
select i.file_id, coalesce(f.sha256, ''), e.blob_id
from job_inputs i
left join files f on f.id = i.file_id
left join extents e on e.file_id = i.file_id and e.at = 0
where i.job_id = :id
order by i.number;

-- ingest_place_put --
insert into ingest_turns (lane, tenant_id, place) values (:lane, :tenant_id, :place)
on conflict (lane, tenant_id) do update set place = excluded.place;

-- ingest_clock_set --
update ingest_clocks set clock = :clock where lane = :lane;

-- ingest_places_forget --
-- A tenant that the clock has passed begins at the clock, so its place is not needed.
delete from ingest_turns where lane = :lane and place <= :clock;

-- ingest_give_back --
-- The process that took these steps does not know how they ended, so any process may take them.
update jobs set step_token = null, step_worker_id = null
where state = 'validating' and step_worker_id = :worker_id and step_token = :token;
