-- Deployments, resources and terms of models that were added at run time, and which deployments are drained. Every change first takes the next number from meta, whose row makes changes wait
-- for one another; a process that knows the number knows everything.

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
-- Its row makes those who wake what rests wait for one another.
insert into meta (name, value) values ('terms', :digest)
on conflict (name) do update set value = excluded.value;

-- every_slice_wake --
-- What rests of any job is looked at again. Items that an upstream put off have a moment of their own, and what a canary holds back rests on.
update slices set ready_at = now_ms() where state = 'ready' and ready_at > now_ms() and ready_at < :forever;

-- every_model_wake --
-- A job that must not begin before a moment waits for it all the same.
update job_models set rests_until = (
    select case when j.not_before > now_ms() then j.not_before else now_ms() end from jobs j where j.id = job_models.job_id
)
where state = 'open' and rests_until > now_ms();
