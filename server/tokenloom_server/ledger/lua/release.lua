local refusal = refused()
if refusal then return refusal end
redis.call('HSET', RUN, 'lease_lapses_at', '0')
return {'ok'}
