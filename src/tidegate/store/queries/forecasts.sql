-- The work that would come before a job that does not exist yet.

-- forecast_flow --
-- The weight of a flow, whether it shares the model now, and the work that is left of its jobs.
select coalesce((select f.weight_milli from flows f where f.model = :model and f.share_owner = :share_owner), 1000) as weight_milli,
    (select count(*) from flows f where f.model = :model and f.share_owner = :share_owner and f.state = 'awake') as awake,
    cast(coalesce((select sum(ahead.units) from (
        select o.work_units - o.work_units * o.done_count / o.item_count as units from job_models o
        where o.model = :model and o.share_owner = :share_owner and o.state = 'open'
        order by o.priority desc, o.created_at, o.job_id
        limit :jobs_max
    ) ahead), 0) as bigint) as ahead_units,
    cast(coalesce((select sum(ahead.items) from (
        select o.item_count - o.done_count as items from job_models o
        where o.model = :model and o.share_owner = :share_owner and o.state = 'open'
        order by o.priority desc, o.created_at, o.job_id
        limit :jobs_max
    ) ahead), 0) as bigint) as ahead_items;
