-- A worker says which item it runs alone, so that its loss is charged to that item only; `alone_losses` counts those losses.

alter table workers add column
    alone_job_id text;

alter table workers add column
    alone_number bigint;

alter table workers add column
    alone_checked bigint;

alter table attempts add column
    alone_losses bigint not null default 0;

create index slices_suspect on slices (job_id, model, lost_count, first) where state = 'ready' and lost_count > 0;
