-- compatible_from: 1

alter table rates add column input_tokens bigint not null default 0;
