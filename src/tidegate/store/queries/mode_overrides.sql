-- The scheduling mode that an operator sets at run time: a row of meta, beside the version of the schema.

-- mode_override_get --
select value from meta where name = :name;

-- mode_override_lock --
-- Who changes one of the two modes leaves the other as it is.
select value from meta where name = :name /*! for update */;

-- mode_override_put --
insert into meta (name, value) values (:name, :value)
on conflict (name) do update set value = excluded.value;
