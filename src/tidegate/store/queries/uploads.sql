-- Files that come in parts.

-- upload_put --
with moment as materialized (select now_ms() as ms)
insert into uploads (id, tenant_id, state, size_bytes, purpose, filename, mime_type, expires_after_ms, created_at, expires_at)
values (:id, :tenant_id, 'pending', :size_bytes, :purpose, :filename, :mime_type, :expires_after_ms,
    (select ms from moment), (select ms from moment) + :keep_ms);

-- upload_get --
-- An upload whose time is over is shown as expired, also before a sweep has changed it.
select *, case when state = 'pending' and expires_at <= now_ms() then 'expired' else state end as shown_state
from uploads where tenant_id = :tenant_id and id = :id;

-- upload_count --
select count(*) from uploads where tenant_id = :tenant_id and state = 'pending';

-- upload_complete --
-- moves: uploads: pending -> completed
update uploads set state = 'completed', file_id = :file_id, parts_hash = :parts_hash, md5 = :md5
where tenant_id = :tenant_id and id = :id and state = 'pending' and expires_at > now_ms()
returning id;

-- upload_cancel --
-- moves: uploads: pending -> cancelled
update uploads set state = 'cancelled'
where tenant_id = :tenant_id and id = :id and state = 'pending' and expires_at > now_ms()
returning id;

-- upload_expire --
-- moves: uploads: pending -> expired
update uploads set state = 'expired' where id = :id and state = 'pending' and expires_at <= now_ms() returning id;

-- uploads_overdue --
select tenant_id, id from uploads where state = 'pending' and expires_at <= now_ms() order by expires_at limit :count_max;

-- uploads_prune --
delete from uploads where state <> 'pending' and expires_at < now_ms() - :keep_ms;

-- upload_part_put --
insert into upload_parts (id, upload_id, blob_id, size_bytes, sha256, created_at)
values (:id, :upload_id, :blob_id, :size_bytes, :sha256, now_ms());

-- upload_part_get --
select * from upload_parts where id = :id;

-- upload_part_list --
select * from upload_parts where upload_id = :upload_id;

-- upload_part_sums --
-- How many parts an upload has, and their bytes.
select count(*), coalesce(sum(size_bytes), 0) from upload_parts where upload_id = :upload_id;

-- upload_parts_delete --
delete from upload_parts where upload_id = :upload_id returning blob_id;
