-- What the scheduler stands on: flows and their service, models' clocks and rates, and what a job is to a flow.

alter table jobs add column
    share_owner text not null default '';
alter table jobs add column
    queue text not null default 'default';
alter table jobs add column
    limits text;
update jobs set share_owner = 'tenant:' || tenant_id;

alter table job_models add column
    state text not null default 'open' check (state in ('open', 'closed'));
alter table job_models add column
    share_owner text not null default '';
alter table job_models add column
    created_at bigint not null default 0;
alter table job_models add column
    expires_at bigint not null default 0;
alter table job_models add column
    due_at bigint not null default 0;
alter table job_models add column
    done_count bigint not null default 0;
alter table job_models add column
    leased_at bigint;
alter table job_models add column
    begin_by bigint;
alter table job_models add column
    begun_at bigint;
alter table job_models add column
    queue text not null default 'default';
alter table job_models add column
    rests_until bigint not null default 0;

-- How many items of a model are done is known exactly where a job has one model, and taken as its share elsewhere.
update job_models set
    share_owner = j.share_owner, created_at = j.created_at, expires_at = j.expires_at,
    due_at = case when j.begun_at is null and j.begin_by < j.expires_at then j.begin_by else j.expires_at end,
    state = case when j.state = 'in_progress' and j.closing is null then 'open' else 'closed' end,
    done_count = case when j.item_count > 0
        then job_models.item_count * (j.answered_count + j.failed_count + j.expired_count + j.cancelled_count) / j.item_count else 0 end,
    leased_at = j.begun_at, begin_by = j.begin_by, begun_at = j.begun_at
from jobs j where j.id = job_models.job_id;
create index job_models_oldest on job_models (model, share_owner, created_at, job_id) where state = 'open';
create index job_models_smallest on job_models (model, share_owner, work_units, job_id) where state = 'open';
create index job_models_due on job_models (model, due_at, job_id) where state = 'open';

alter table slices add column
    leased_as text;
update slices set leased_as = 'fifo' where state = 'leased';
create index slices_out on slices (job_id, model) where state = 'leased';

-- The queue of one share_owner for one model. `served` is what record charged it, in tokens divided by its weight; a flow that wakes is lifted to
-- the least awake one of its model. `asleep` with `wakes_at`: all that is left of it rests until then.
create table flows (
    model text not null,
    share_owner text not null,
    tenant_id text not null,
    state text not null check (state in ('awake', 'asleep')),
    weight_milli bigint not null,
    served bigint not null,
    served_tokens bigint not null,
    changed_at bigint not null,
    wakes_at bigint,
    primary key (model, share_owner)
);
create index flows_awake on flows (model, served, share_owner) where state = 'awake';
create index flows_resting on flows (wakes_at) where state = 'asleep' and wakes_at is not null;
create index flows_idle on flows (changed_at) where state = 'asleep';

-- How far a model's flows had come when they went to sleep: where the next one begins that wakes alone.
create table model_clocks (
    model text primary key,
    clock bigint not null
);

-- What each worker had answered, by minute: estimated units, the tokens they really cost, items. Nobody else writes a worker's row.
create table rates (
    model text not null,
    minute bigint not null,
    worker_id text not null,
    units bigint not null,
    tokens bigint not null,
    items bigint not null,
    primary key (model, minute, worker_id)
);
create index rates_by_age on rates (minute);

-- Jobs in flight go on: their flows are awake, side by side.
insert into flows (model, share_owner, tenant_id, state, weight_milli, served, served_tokens, changed_at)
select distinct m.model, m.share_owner, j.tenant_id, 'awake', 1000, 0, 0, now_ms()
from job_models m
join jobs j on j.id = m.job_id
where m.state = 'open';
