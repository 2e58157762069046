-- Deployments and resources that an operator added at run time, beside those in the settings.

create table routing (
    kind text not null check (kind in ('deployment', 'resource')),
    name text not null,
    document text not null,
    revision bigint not null,
    changed_at bigint not null,
    primary key (kind, name)
);
