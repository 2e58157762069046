-- What holds for a model as a whole can be said at run time too. A check cannot be changed in place in every database, so the table is made
-- anew; it is small.

create table routing_kept as select kind, name, document, revision, changed_at from routing;

drop table routing;

create table routing (
    kind text not null check (kind in ('deployment', 'resource', 'model')),
    name text not null,
    document text not null,
    revision bigint not null,
    changed_at bigint not null,
    primary key (kind, name)
);

insert into routing (kind, name, document, revision, changed_at) select kind, name, document, revision, changed_at from routing_kept;

drop table routing_kept;
