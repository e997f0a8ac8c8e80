"""The processor as a device, for tests of passes and meanings that run what they build."""

from tests.support.built_modules import device

__all__ = ["device"]
