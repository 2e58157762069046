-- What a job would stand behind that is not there yet.

-- prospect_flow --
-- The weight of a flow, whether it shares the model now, and what it still has of its jobs.
select coalesce((select f.weight_milli from flows f where f.model = :model and f.scope = :scope), 1000) as weight_milli,
    (select count(*) from flows f where f.model = :model and f.scope = :scope and f.state = 'awake') as awake,
    cast(coalesce((select sum(ahead.units) from (
        select o.work_units - o.work_units * o.done_count / o.item_count as units from job_models o
        where o.model = :model and o.scope = :scope and o.state = 'open'
        order by o.created_at, o.job_id
        limit :jobs_max
    ) ahead), 0) as bigint) as ahead_units;
