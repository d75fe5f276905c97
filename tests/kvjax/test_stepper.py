"""What the stepper asks of the cache while nobody comes or goes."""

from unittest import mock

from kvjax import engine as engines
from kvjax import request as requests
from kvjax import testing


def test_a_batch_is_looked_up_again_only_when_its_members_change():
  model = testing.random_decoder(testing.tiny_config(num_layers=1))
  with engines.Engine(model, num_pages=64, max_sequences=4) as engine:
    batch = engine.cache.batch
    with mock.patch.object(engine.cache, "batch", side_effect=batch) as made:
      engine.generate(
        [[5, 6, 7], [8, 9]],
        [
          requests.SamplingParams(max_tokens=count, ignore_eos=True)
          for count in (24, 12)
        ],
      )
    # Both together, then the one that goes on alone.
    assert made.call_count == 2
    assert engine.cache.audit() == ()
