-- Deployments, resources and terms of models that were added at run time, and which deployments are
-- drained. Each change first takes the next number from meta, which serializes changes. A process
-- that has seen the number has seen all changes up to it.

-- routing_number_next --
insert into meta (name, value) values ('routing_number', '1')
on conflict (name) do update set value = cast(cast(meta.value as bigint) + 1 as text)
returning cast(value as bigint);

-- routing_number --
select cast(value as bigint) from meta where name = 'routing_number';

-- routing_all --
select kind, name, document, revision, changed_at from routing order by kind, name;

-- routing_one --
select document, revision from routing where kind = :kind and name = :name;

-- routing_count --
select count(*) from routing;

-- routing_put --
insert into routing (kind, name, document, revision, changed_at) values (:kind, :name, :document, :revision, now_ms())
on conflict (kind, name) do update set
    document = excluded.document, revision = excluded.revision, changed_at = excluded.changed_at;

-- routing_drop --
delete from routing where kind = :kind and name = :name;

-- routing_wanted --
select 1 from job_models where model = :model and state = 'open' limit 1;

-- terms_get --
select value from meta where name = 'terms';

-- terms_put --
-- The lock on this row serializes the processes that wake resting work.
insert into meta (name, value) values ('terms', :digest)
on conflict (name) do update set value = excluded.value;

-- every_slice_wake --
-- Wake the resting slices of all jobs. Items that wait for an upstream have their own times, and
-- slices behind a canary keep resting.
update slices set ready_at = now_ms() where state = 'ready' and ready_at > now_ms() and ready_at < :forever;

-- every_model_wake --
-- A job with a `not_before` still waits for that moment.
update job_models set rests_until = (
    select case when j.not_before > now_ms() then j.not_before else now_ms() end from jobs j where j.id = job_models.job_id
)
where state = 'open' and rests_until > now_ms();
