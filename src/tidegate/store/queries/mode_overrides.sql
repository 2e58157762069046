-- The scheduling mode that an operator sets at run time: a row of meta, beside the version of the schema.

-- mode_override_get --
select value from meta where name = :name;

-- mode_override_lock --
-- Locked, because a change of one of the two modes must keep the other.
select value from meta where name = :name /*! for update */;

-- mode_override_put --
insert into meta (name, value) values (:name, :value)
on conflict (name) do update set value = excluded.value;
