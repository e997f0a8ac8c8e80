"""Run a scheduler here, and keep workers for it in SLURM jobs, through dask-jobqueue, until interrupted.

    python -P fleet.py --device cuda --jobs 8 --sbatch=--gres=gpu:1 --sbatch=--requeue --partition gpu \
      --host 10.0.0.1 --ca ca.pem --certificate head.pem --key head.key \
      --worker-certificate nodes.pem --worker-key nodes.key

The first certificate is of the role scheduler, the second of the role worker. On loopback both are made.
A job that ends or is requeued is replaced within a minute.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading

import dask
from dask_jobqueue import SLURMCluster

from relax_tune.tuner.measure.cluster.address import TlsFiles
from relax_tune.tuner.measure.cluster.processes import free_port
from relax_tune.tuner.measure.cluster.scheduler import FleetScheduler
from relax_tune.tuner.measure.cluster.tls import check_files
from relax_tune.tuner.measure.cluster.trust.loopback import make_loopback, place_of
from relax_tune.tuner.measure.cluster.trust.security import FleetSecurity

PRELOAD = "relax_tune.tuner.measure.cluster.preload"
WORKER = "relax_tune.tuner.measure.cluster.worker.FleetWorker"
# As `relax-tune scheduler` sets: we send a lost batch again ourselves, and a silent worker is given up after a minute.
SETTINGS = {
    "distributed.scheduler.allowed-failures": 0,
    "distributed.scheduler.worker-ttl": "60s",
    "distributed.scheduler.work-stealing": False,
}


def arguments() -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", required=True, help="what each job lends: c, opencl or cuda")
    parser.add_argument("--jobs", type=int, default=1, help="SLURM jobs to keep")
    parser.add_argument("--tolerance", default="1.25", help="as of relax-tune worker")
    parser.add_argument("--partition")
    parser.add_argument("--cores", type=int, default=1, help="processors of a job")
    parser.add_argument("--memory", default="4GB")
    parser.add_argument("--walltime", default="24:00:00")
    parser.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help="such as --gres=gpu:1")
    parser.add_argument(
        "--prologue", action="append", default=[], metavar="LINE", help="shell before the worker starts"
    )
    parser.add_argument("--logs", default="slurm-logs")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen; beyond loopback with certificates")
    parser.add_argument("--port", type=int, default=8786)
    for name in ("--ca", "--certificate", "--key", "--worker-certificate", "--worker-key"):
        parser.add_argument(name)
    given = parser.parse_args()
    files = (given.ca, given.certificate, given.key, given.worker_certificate, given.worker_key)
    if any(files) and not all(files):
        parser.error("wanted --ca, --certificate, --key, --worker-certificate and --worker-key together")
    if not any(files) and given.host not in ("127.0.0.1", "localhost", "::1"):
        parser.error("wanted certificates beyond loopback: whoever reaches a scheduler can run programs on its workers")
    return given


def main() -> None:
    """Start the fleet and wait for SIGINT or SIGTERM."""
    given = arguments()
    if given.ca:
        head = TlsFiles(given.ca, given.certificate, given.key)
        worker = TlsFiles(given.ca, given.worker_certificate, given.worker_key)
    else:
        head = make_loopback(free_port(given.host, given.port))
        worker = place_of(f"tls://127.0.0.1:{given.port}", None, "worker", 0.0)[1]
    check_files(head, ("scheduler",))
    check_files(worker, ("worker",))
    security = FleetSecurity(head)
    security.tls_worker_cert, security.tls_worker_key = worker.certificate, worker.key
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with (
        dask.config.set(SETTINGS),
        SLURMCluster(
            queue=given.partition,
            cores=1,  # batches at a time: a unit measures one
            job_cpu=given.cores,
            processes=1,
            memory=given.memory,
            walltime=given.walltime,
            nanny=False,
            death_timeout=120,
            protocol="tls",
            scheduler_cls=FleetScheduler,
            security=security,
            job_extra_directives=given.sbatch,
            job_script_prologue=given.prologue,
            python=f"{sys.executable} -P",  # a job starts in the folder of its submission, which is no place for modules
            worker_extra_args=[
                "--worker-class",
                WORKER,
                "--preload",
                PRELOAD,
                "--device",
                given.device,
                "--tolerance",
                given.tolerance,
            ],
            log_directory=given.logs,
            scheduler_options={"host": given.host, "port": given.port, "dashboard": False},
        ) as cluster,
    ):
        cluster.scale(jobs=given.jobs)
        print(f"scheduler at {cluster.scheduler_address}; the job script:\n{cluster.job_script()}", flush=True)
        while not stop.wait(10):
            cluster.scale(
                jobs=given.jobs
            )  # dask-jobqueue cancels the job of a worker that has left; this submits another


if __name__ == "__main__":
    main()
