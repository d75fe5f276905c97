"""`kvjax.errors` holds every error that kvjax raises on purpose."""

import inspect

import host_allocator.errors
from kvjax import errors


def _errors_of(module):
  return {
    name: value
    for name, value in inspect.getmembers(module, inspect.isclass)
    if issubclass(value, errors.KVError) and not name.startswith("_")
  }


def test_the_allocators_errors_are_all_here():
  ours = _errors_of(errors)
  for name, error in _errors_of(host_allocator.errors).items():
    assert ours.get(name) is error


def test_reasons_are_stable_and_distinct():
  reasons = [error.reason for error in _errors_of(errors).values()]
  assert len(set(reasons)) == len(reasons)
  assert errors.CheckpointError.reason == "checkpoint_error"
  assert errors.UnsupportedCheckpoint.reason == "unsupported_checkpoint"
  assert errors.BadRequest.reason == "bad_request"
  assert errors.EngineClosed.reason == "engine_closed"
