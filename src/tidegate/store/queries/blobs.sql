-- Blobs. A row is written before the bytes, and `condemned` is set before their removal.

-- blob_put --
-- A blob has a row before it has bytes.
insert into blobs (id, kind, state, worker_id, size_bytes, uses, recorded_to, created_at)
values (:id, :kind, 'writing', :worker_id, 0, 0, 0, now_ms())
on conflict (id) do nothing;

-- blob_keep --
-- The bytes of the blob are durable and used. No row: it was condemned meanwhile, so its bytes must
-- not be used.
-- moves: blobs: writing -> kept
update blobs set state = 'kept', size_bytes = :size_bytes, uses = uses + :uses
where id = :id and state = 'writing'
returning id;

-- blob_share --
-- Add one use of these bytes, in the transaction that kept them.
update blobs set uses = uses + 1 where id = :id;

-- blob_use --
-- Add uses of these bytes, which have other uses meanwhile.
update blobs set uses = uses + :uses where id = :id;

-- blob_extend --
-- Record adds uses of a log's bytes. No row: the log was condemned, and record must refuse its
-- extents.
update blobs
set uses = uses + :uses,
    size_bytes = case when size_bytes > :recorded_to then size_bytes else :recorded_to end,
    recorded_to = case when recorded_to > :recorded_to then recorded_to else :recorded_to end
where id = :id and state in ('writing', 'kept')
returning worker_id;

-- blob_hold --
-- A transaction that changes several blobs first locks all of them, by id.
select id from blobs where id = :id /*! for update */;

-- blob_recorded_to --
-- How far a log was recorded. Lines before that place are a replay.
select recorded_to from blobs where id = :id;

-- blob_release --
-- Remove uses of these bytes.
update blobs set uses = uses - :uses where id = :id;

-- blob_settle --
-- A log whose owner is gone is finished: its owner records nothing more from it, unless it was only
-- paused.
-- moves: blobs: writing -> kept
update blobs set state = 'kept' where id = :id and state = 'writing' returning uses;

-- blobs_condemn_unused --
-- Condemn blobs that are kept but unused. A log must also be old, because its owner may only be
-- paused and record more of it. Any other blob is never used again once it is unused.
-- moves: blobs: kept -> condemned
update blobs set state = 'condemned', condemned_at = now_ms()
where id in (
    select id from blobs
    where state = 'kept' and uses = 0
        and created_at < now_ms() - case when kind in ('answers', 'errors') then cast(:age_ms as bigint) else cast(:soon_ms as bigint) end
    order by created_at limit :count_max
) and state = 'kept' and uses = 0
returning id;

-- blob_condemn_upload --
-- The only file that used this upload is deleted.
-- moves: blobs: kept -> condemned
update blobs set state = 'condemned', condemned_at = now_ms()
where id = :id and kind = 'upload' and state = 'kept' and uses = 0
returning id;

-- blob_condemn --
-- The owner itself gave this blob up: a void log, or an aborted upload.
-- moves: blobs: writing -> condemned
update blobs set state = 'condemned', condemned_at = now_ms() where id = :id and state = 'writing' and uses = 0 returning id;

-- blobs_abandoned --
-- Blobs that are being written by owners that are gone: logs to adopt, uploads and work files to
-- condemn.
select b.id, b.kind, b.recorded_to, b.worker_id, now_ms() - coalesce(w.alive_until, 0) as gone_for_ms
from blobs b
left join workers w on w.id = b.worker_id
where b.state = 'writing' and (w.state is null or w.state <> 'alive')
order by b.created_at
limit :count_max;

-- blobs_condemned --
-- Condemned blobs whose bytes may be removed now: logs after a while, others soon.
select id from blobs
where state = 'condemned'
    and condemned_at < now_ms() - case when kind in ('answers', 'errors') then cast(:age_ms as bigint) else cast(:soon_ms as bigint) end
order by condemned_at limit :count_max;

-- blob_forget --
delete from blobs where id = :id and state = 'condemned' returning id;

-- blobs_page --
select id, state, size_bytes, uses from blobs where id > :after order by id limit :count_max;

-- blob_files --
-- Some files that use these bytes.
select distinct f.id from extents e join files f on f.id = e.file_id where e.blob_id = :id order by f.id limit :count_max;

-- blob_get --
select id, kind, state, worker_id, size_bytes, uses, recorded_to, created_at from blobs where id = :id;
