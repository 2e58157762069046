-- What an operator switches at run time; a row of meta each, beside the version of the schema.

-- switch_get --
select value from meta where name = :name;

-- switch_put --
insert into meta (name, value) values (:name, :value)
on conflict (name) do update set value = excluded.value;
