-- Idempotency-Keys of callers, and the objects that they made.

-- idempotency_get --
select body_hash, object_id from idempotency where tenant_id = :tenant_id and route = :route and key = :key and created_at > now_ms() - :keep_ms;

-- idempotency_forget --
delete from idempotency where tenant_id = :tenant_id and route = :route and key = :key and created_at <= now_ms() - :keep_ms;

-- idempotency_put --
insert into idempotency (tenant_id, route, key, body_hash, object_id, created_at)
values (:tenant_id, :route, :key, :body_hash, :object_id, now_ms());

-- idempotency_take_back --
delete from idempotency where tenant_id = :tenant_id and route = :route and key = :key and object_id = :object_id;

-- idempotency_prune --
delete from idempotency where (tenant_id, route, key) in (
    select tenant_id, route, key from idempotency where created_at < (select now_ms()) - :keep_ms order by created_at limit :count_max
)
returning 1;
