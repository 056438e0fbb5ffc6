-- A run at one moment.
return {
  redis.call('HGETALL', RUN),
  redis.call('HGET', OPENINGS, field('generation') or '0'),
  redis.call('HGETALL', SAMPLES),
  redis.call('HGETALL', ROWS),
  redis.call('HGETALL', TOKENS),
}
