local refusal = refused()
if refusal then return refusal end
return {'ok', redis.call('HINCRBY', RUN, 'epoch', 1)}
