-- Files, and the extents that they are made of.

-- file_put --
with moment as materialized (select now_ms() as ms)
insert into files (id, tenant_id, job_id, purpose, filename, state, size_bytes, line_count, sha256, created_at, expires_at)
values (:id, :tenant_id, :job_id, :purpose, :filename, :state, :size_bytes, :line_count, :sha256, (select ms from moment),
    (select ms from moment) + cast(:expires_after_ms as bigint));

-- file_get --
-- A caller's own file, while it is visible.
select * from files where tenant_id = :tenant_id and id = :id and state = 'ready' and (expires_at is null or expires_at > now_ms());

-- file_get_growing --
-- A result file of a caller's own running job.
select * from files where tenant_id = :tenant_id and id = :id and state = 'growing';

-- file_any --
-- A file of any tenant in any state, for the engine.
select * from files where id = :id;

-- file_owner --
-- The name of a file's tenant, while the file is visible.
select t.name from files f join tenants t on t.id = f.tenant_id
where f.id = :id and f.state = 'ready' and (f.expires_at is null or f.expires_at > now_ms());

-- file_cursor --
-- The place where a page begins. Deleted files still have one.
select created_at, id from files where tenant_id = :tenant_id and id = :id and state <> 'growing';

-- file_list_desc --
-- The files of responses are in no list.
select * from files
where tenant_id = :tenant_id and state = 'ready' and (expires_at is null or expires_at > now_ms())
    and purpose not in ('response', 'response_output', 'whole') and (cast(:purpose as text) is null or purpose = :purpose)
    and (created_at < :created_at or (created_at = :created_at and id < :id))
order by created_at desc, id desc
limit :count_max;

-- file_list_asc --
select * from files
where tenant_id = :tenant_id and state = 'ready' and (expires_at is null or expires_at > now_ms())
    and purpose not in ('response', 'response_output', 'whole') and (cast(:purpose as text) is null or purpose = :purpose)
    and (created_at > :created_at or (created_at = :created_at and id > :id))
order by created_at asc, id asc
limit :count_max;

-- file_needed --
-- An input is needed until its job has been ingested.
select id from jobs where input_file_id = :id and state = 'validating'
union all
select j.id from job_inputs i join jobs j on j.id = i.job_id where i.file_id = :id and j.state = 'validating'
limit 1;

-- file_used --
-- Whether a job uses a file as its input.
select id from jobs where input_file_id = :id
union all
select job_id from job_inputs where file_id = :id
limit 1;

-- file_delete --
-- moves: files: ready -> deleted
update files set state = 'deleted', deleted_at = now_ms()
where tenant_id = :tenant_id and id = :id and state = 'ready'
returning id, job_id;

-- file_lock --
-- Lock a file while its extents are replaced, so that no other transaction releases the same
-- extents.
select id from files where id = :id and state <> 'deleted' /*! for update */;

-- file_show --
-- moves: files: growing -> ready
with moment as materialized (select now_ms() as ms)
update files set state = 'ready', size_bytes = :size_bytes, line_count = :line_count, created_at = moment.ms,
    expires_at = moment.ms + cast(:expires_after_ms as bigint)
from moment
where id = :id and state = 'growing'
returning id;

-- file_hide --
-- A file that was cut into parts is in no list.
update files set purpose = 'whole' where id = :id and state = 'ready';

-- file_is_shown --
select 1 from files where id = :id and state = 'ready';

-- file_drop --
-- A result file that stayed empty is never shown.
-- moves: files: growing -> deleted
update files set state = 'deleted', deleted_at = now_ms() where id = :id and state = 'growing' returning id;

-- files_expired --
select tenant_id, id from files
where state = 'ready' and expires_at <= (select now_ms())
    and not exists (select 1 from jobs j where j.input_file_id = files.id and j.state = 'validating')
    and not exists (
        select 1 from job_inputs i join jobs j on j.id = i.job_id where i.file_id = files.id and j.state = 'validating'
    )
order by expires_at
limit :count_max;

-- files_prune --
delete from files where id in (
    select id from files where state = 'deleted' and deleted_at < (select now_ms()) - :keep_ms order by deleted_at limit :count_max
);

-- extent_put --
insert into extents (file_id, at, size_bytes, blob_id, blob_at) values (:file_id, :at, :size_bytes, :blob_id, :blob_at);

-- extent_grow --
-- The new bytes follow the last extent in the file and in the same blob: one extent instead of two.
update extents set size_bytes = size_bytes + :size_bytes
where file_id = :file_id
    and at = (select max(e.at) from extents e where e.file_id = :file_id)
    and at + size_bytes = :at and blob_id = :blob_id and blob_at + size_bytes = :blob_at
returning file_id;

-- extent_list --
-- The extents of a file that end after a place, in order.
select at, size_bytes, blob_id, blob_at from extents
where file_id = :file_id and at + size_bytes > :from_at
order by at
limit :count_max;

-- extent_blobs --
-- The blobs of a file's extents.
select distinct blob_id from extents where file_id = :file_id;

-- extent_delete --
delete from extents where file_id = :file_id and at >= :from_at and at < :to_at returning at, size_bytes, blob_id, blob_at;

-- extent_crowded --
-- Files with too many extents for fast reads.
select file_id, count(*) as pieces from extents group by file_id having count(*) > :count_max order by count(*) desc limit 4;
