-- compatible_from: 1

alter table rates add column input_tokens bigint not null default 0;

alter table jobs add column final_cost_nano bigint;
alter table jobs add column final_failed_ppm bigint;
update jobs set final_cost_nano = cost_nano, final_failed_ppm = case when item_count > 0 then 1000000 * failed_count / item_count end
where state in ('completed', 'failed', 'expired', 'cancelled');
create index jobs_by_deadline on jobs (expires_at, id)
    where kind = 'batch' and state in ('validating', 'in_progress', 'cancelling', 'finalizing');
create index jobs_by_size on jobs (item_count, id) where kind = 'batch';
create index jobs_by_cost on jobs (final_cost_nano, id) where kind = 'batch' and final_cost_nano > 0;
create index jobs_by_failed on jobs (final_failed_ppm, id) where kind = 'batch' and final_failed_ppm > 0;
