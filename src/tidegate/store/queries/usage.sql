-- Usage and its cost.

-- usage_add --
-- The owner is taken from the job. This transaction has locked its row, so two flushes never write
-- at once.
insert into usage (day, job_id, model, deployment, tenant_id, team, user_name, key_id, calls, input_tokens, cached_tokens, output_tokens,
    reasoning_tokens, input_nano, cached_nano, output_nano)
select now_ms() / 86400000, j.id, cast(:model as text), cast(:deployment as text), j.tenant_id, coalesce(k.team, ''),
    coalesce(j.user_name, ''), coalesce(j.key_id, ''), cast(:calls as bigint), cast(:input_tokens as bigint),
    cast(:cached_tokens as bigint), cast(:output_tokens as bigint), cast(:reasoning_tokens as bigint), cast(:input_nano as bigint),
    cast(:cached_nano as bigint), cast(:output_nano as bigint)
from jobs j
left join keys k on k.id = j.key_id
where j.id = :job_id
on conflict (day, job_id, model, deployment) do update set
    calls = usage.calls + excluded.calls, input_tokens = usage.input_tokens + excluded.input_tokens,
    cached_tokens = usage.cached_tokens + excluded.cached_tokens, output_tokens = usage.output_tokens + excluded.output_tokens,
    reasoning_tokens = usage.reasoning_tokens + excluded.reasoning_tokens, input_nano = usage.input_nano + excluded.input_nano,
    cached_nano = usage.cached_nano + excluded.cached_nano, output_nano = usage.output_nano + excluded.output_nano;

-- usage_writer --
-- Whether this flush of this process is new. No row: it was committed before.
insert into usage_writers (id, flush_number, wrote_at) values (:writer, :number, now_ms())
on conflict (id) do update set flush_number = excluded.flush_number, wrote_at = excluded.wrote_at
where usage_writers.flush_number < excluded.flush_number
returning id;

-- usage_writers_prune --
-- Processes that wrote nothing for a week will not write again.
delete from usage_writers where wrote_at < now_ms() - 604800000;

-- usage_interactive_add --
insert into usage_interactive (day, tenant_id, key_id, model, deployment, team, user_name, calls, input_tokens, cached_tokens,
    output_tokens, reasoning_tokens, input_nano, cached_nano, output_nano)
values (now_ms() / 86400000, :tenant_id, :key_id, :model, :deployment, :team, :user_name, :calls, :input_tokens, :cached_tokens,
    :output_tokens, :reasoning_tokens, :input_nano, :cached_nano, :output_nano)
on conflict (day, tenant_id, key_id, model, deployment) do update set
    calls = usage_interactive.calls + excluded.calls,
    input_tokens = usage_interactive.input_tokens + excluded.input_tokens,
    cached_tokens = usage_interactive.cached_tokens + excluded.cached_tokens,
    output_tokens = usage_interactive.output_tokens + excluded.output_tokens,
    reasoning_tokens = usage_interactive.reasoning_tokens + excluded.reasoning_tokens,
    input_nano = usage_interactive.input_nano + excluded.input_nano,
    cached_nano = usage_interactive.cached_nano + excluded.cached_nano,
    output_nano = usage_interactive.output_nano + excluded.output_nano;

-- usage_by_job --
-- Interactive calls belong to no job.
select u.day, coalesce(t.name, u.tenant_id), u.team, u.user_name, u.key_id, u.job_id, u.model, u.deployment,
    u.calls, u.input_tokens, u.cached_tokens, u.output_tokens, u.reasoning_tokens, u.input_nano, u.cached_nano, u.output_nano
from (
    select day, tenant_id, team, user_name, key_id, job_id, model, deployment, calls, input_tokens, cached_tokens, output_tokens,
        reasoning_tokens, input_nano, cached_nano, output_nano
    from usage
    union all
    select day, tenant_id, team, user_name, key_id, '' as job_id, model, deployment, calls, input_tokens, cached_tokens, output_tokens,
        reasoning_tokens, input_nano, cached_nano, output_nano
    from usage_interactive
) u
left join tenants t on t.id = u.tenant_id
where u.day >= :from_day and u.day < :to_day and (u.tenant_id = :tenant_id or :tenant_id = '')
order by u.day, u.job_id, u.tenant_id, u.key_id, u.model, u.deployment
limit :count_max;

-- usage_by_day --
-- The sums over all jobs, so the number of rows does not depend on the number of jobs.
select u.day, coalesce(t.name, u.tenant_id), u.team, u.user_name, u.key_id, '', u.model, u.deployment,
    cast(sum(u.calls) as bigint),
    cast(sum(u.input_tokens) as bigint),
    cast(sum(u.cached_tokens) as bigint),
    cast(sum(u.output_tokens) as bigint),
    cast(sum(u.reasoning_tokens) as bigint),
    cast(sum(u.input_nano) as bigint),
    cast(sum(u.cached_nano) as bigint),
    cast(sum(u.output_nano) as bigint)
from (
    select day, tenant_id, team, user_name, key_id, model, deployment, calls, input_tokens, cached_tokens, output_tokens,
        reasoning_tokens, input_nano, cached_nano, output_nano
    from usage
    union all
    select day, tenant_id, team, user_name, key_id, model, deployment, calls, input_tokens, cached_tokens, output_tokens,
        reasoning_tokens, input_nano, cached_nano, output_nano
    from usage_interactive
) u
left join tenants t on t.id = u.tenant_id
where u.day >= :from_day and u.day < :to_day and (u.tenant_id = :tenant_id or :tenant_id = '')
group by u.day, t.name, u.tenant_id, u.team, u.user_name, u.key_id, u.model, u.deployment
order by u.day, u.tenant_id, u.team, u.user_name, u.key_id, u.model, u.deployment
limit :count_max;
