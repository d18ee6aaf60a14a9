"""The GPU back end: weights on the device, steps that are captured once and replayed."""
