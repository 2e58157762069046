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
