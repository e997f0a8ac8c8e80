"""The commands of `relax-tune`, one module each; `relax_tune.tuner.cli.app` loads the requested one."""
