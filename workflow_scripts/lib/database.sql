-- study.sqlite: every step of a study. Bytes are bytes, times are seconds, rates are per second,
-- accuracies are shares from 0 to 1; NULL is what does not apply or was not measured.

CREATE TABLE examples (              -- one row per set of token rows, that is tokenizer and context
  examples INTEGER PRIMARY KEY,
  tokenizer TEXT NOT NULL,
  context INTEGER NOT NULL,          -- tokens
  tokenizer_sha256 TEXT,
  strategy TEXT,
  overlong TEXT,
  repeated_context REAL,
  thinking TEXT,
  tools INTEGER,                     -- 0 or 1: tool definitions in the system prompt
  tool_result_tokens INTEGER,
  system_prompt TEXT,
  UNIQUE (tokenizer, context)
);

CREATE TABLE splits (                -- what there is to learn from, in training and validation
  examples INTEGER NOT NULL REFERENCES examples (examples),
  split TEXT NOT NULL,               -- train or val
  conversations INTEGER,
  rows INTEGER,
  tokens INTEGER,
  supervised_tokens INTEGER,
  length_min INTEGER,                -- tokens of a row
  length_p50 INTEGER,
  length_p95 INTEGER,
  length_max INTEGER,
  PRIMARY KEY (examples, split)
) WITHOUT ROWID;

CREATE TABLE left_out (              -- what was dropped or cut on the way into rows
  examples INTEGER NOT NULL,
  split TEXT NOT NULL,
  what TEXT NOT NULL,                -- dropped or cut
  reason TEXT NOT NULL,
  count INTEGER NOT NULL,
  PRIMARY KEY (examples, split, what, reason),
  FOREIGN KEY (examples, split) REFERENCES splits (examples, split)
) WITHOUT ROWID;

CREATE TABLE runs (                  -- one row per training run, as in summary.csv
  run INTEGER PRIMARY KEY,
  examples INTEGER REFERENCES examples (examples),
  study TEXT NOT NULL,
  backend TEXT NOT NULL,
  engine TEXT NOT NULL,
  device TEXT,
  dtype TEXT,
  bits INTEGER,                      -- of quantized weights; NULL where they are whole
  group_size INTEGER,
  model TEXT NOT NULL,
  revision TEXT,
  tokenizer TEXT,
  context INTEGER NOT NULL,
  variant TEXT NOT NULL,
  recipe TEXT,
  loop TEXT,
  seed INTEGER,
  learning_rate REAL,
  micro_batch INTEGER,               -- rows a forward pass
  effective_batch INTEGER,           -- rows an optimizer step
  gradient_checkpointing INTEGER,    -- 0 or 1
  loader TEXT,
  status TEXT NOT NULL,
  reason TEXT,                       -- of a status other than ok, with what to try
  log_end TEXT,                      -- the last lines of the log, where it was cut off
  last_step INTEGER,
  resumed INTEGER,                   -- how often it went on from a checkpoint
  optimizer_steps INTEGER,
  skipped_steps INTEGER,             -- optimizer steps whose float16 gradient overflowed
  distinct_shapes INTEGER,
  compile_seconds REAL,
  train_seconds REAL,
  evaluation_seconds REAL,
  wall_seconds REAL,
  started_at TEXT,                   -- ISO 8601, UTC
  optimizer_steps_per_s REAL,
  micro_batches_per_s REAL,
  sequences_per_s REAL,
  tokens_per_s REAL,                 -- real tokens, padding left out
  supervised_tokens_per_s REAL,
  padded_tokens_per_s REAL,          -- all tokens computed
  step_seconds_p50 REAL,
  step_seconds_p95 REAL,
  flops_per_token REAL,              -- per computed token
  matmul_peak_flops REAL,            -- measured, FLOP per second
  utilization REAL,                  -- share of that peak; above 1 a rate is implausible
  trained_tokens INTEGER,
  trained_supervised_tokens INTEGER,
  load_peak_bytes INTEGER,
  peak_device_bytes INTEGER,
  peak_reserved_bytes INTEGER,
  peak_process_bytes INTEGER,
  swap_growth_bytes INTEGER,
  predicted_peak_bytes INTEGER,
  val_loss_before REAL,
  val_loss REAL,
  val_token_accuracy_before REAL,
  val_token_accuracy REAL,
  val_rows INTEGER,
  val_tokens INTEGER,                -- supervised tokens that loss and accuracy are over
  trainable_parameters INTEGER,
  total_parameters INTEGER,
  examples_sha256 TEXT,
  model_sha256 TEXT,
  initial_adapter_sha256 TEXT,       -- where LoRA started
  chip TEXT,
  os TEXT,
  UNIQUE (backend, model, context, variant)
);
CREATE INDEX runs_by_problem ON runs (model, context, backend);
CREATE INDEX runs_by_examples ON runs (examples);

CREATE TABLE steps (                 -- one row per optimizer step
  run INTEGER NOT NULL REFERENCES runs (run),
  step INTEGER NOT NULL,             -- from 1
  loss REAL,                         -- mean over the supervised tokens of the step
  token_accuracy REAL,
  learning_rate REAL,
  grad_norm REAL,                    -- before clipping; NULL where the step was skipped
  seconds REAL,
  tokens INTEGER,
  supervised_tokens INTEGER,
  padded_tokens INTEGER,
  device_bytes INTEGER,
  new_shape INTEGER,                 -- 0 or 1: compiled for; rates leave these steps out
  flops REAL,                        -- arithmetic of the step
  PRIMARY KEY (run, step)
) WITHOUT ROWID;

CREATE TABLE evaluations (           -- validation, every row once, weighted by token
  run INTEGER NOT NULL REFERENCES runs (run),
  moment TEXT NOT NULL,              -- before or after training
  loss REAL,
  token_accuracy REAL,
  rows INTEGER,
  tokens INTEGER,
  PRIMARY KEY (run, moment)
) WITHOUT ROWID;

CREATE TABLE memory_samples (        -- one row about every second of a run
  run INTEGER NOT NULL REFERENCES runs (run),
  seconds REAL NOT NULL,             -- of the training's processes so far, all attempts together
  process_bytes INTEGER,             -- of all processes of the training
  available_bytes INTEGER,           -- of the machine
  swap_used_bytes INTEGER,
  device_bytes INTEGER,              -- as the engine reports them; NULL where it keeps no counter
  PRIMARY KEY (run, seconds)
) WITHOUT ROWID;

CREATE TABLE versions (              -- what a run ran on
  run INTEGER NOT NULL REFERENCES runs (run),
  package TEXT NOT NULL,
  version TEXT NOT NULL,
  PRIMARY KEY (run, package)
) WITHOUT ROWID;

CREATE VIEW speed_by_context AS
SELECT backend, model, context, variant, coalesce(bits || '-bit', dtype) AS weights,
       tokens_per_s, supervised_tokens_per_s, padded_tokens_per_s, sequences_per_s,
       optimizer_steps_per_s, utilization, peak_process_bytes, peak_device_bytes
FROM runs
WHERE status = 'ok'
ORDER BY model, context, backend, variant;

CREATE VIEW loss_at_step AS
SELECT backend, model, context, variant, step, loss, token_accuracy, steps.learning_rate,
       sum(tokens) OVER so_far AS tokens_so_far,
       sum(seconds) OVER so_far AS seconds_so_far
FROM steps JOIN runs USING (run)
WINDOW so_far AS (PARTITION BY run ORDER BY step);

CREATE VIEW learning AS
SELECT backend, model, context, variant, status, before.loss AS loss_before,
       after.loss AS loss_after, before.token_accuracy AS accuracy_before,
       after.token_accuracy AS accuracy_after, after.rows, after.tokens, examples_sha256
FROM runs
JOIN evaluations AS before ON before.run = runs.run AND before.moment = 'before'
JOIN evaluations AS after ON after.run = runs.run AND after.moment = 'after'
ORDER BY model, context, backend, variant;
