//! All suites but `cluster`, in one program with one queue.
//!
//! `cargo suites moves::` runs a suite.

mod bounds;
mod conformance;
mod connections;
mod cri;
mod crio;
mod damaged_images;
mod deleted_names;
mod device_free;
mod docker;
mod doctor;
mod faults;
mod forked_children;
mod gpu_choice;
mod gpu_requests;
mod guide;
mod history;
mod image_privileges;
mod install;
mod interposed;
mod job_hooks;
mod killed_restores;
mod leaks;
mod listing;
mod moves;
mod nerdctl;
mod objects;
mod package;
mod pauses;
mod podman;
mod ranks;
mod recovery;
mod refusals;
mod remaps;
mod remote_stores;
mod responsive;
mod restarts;
mod restore_failures;
mod restore_mounts;
mod secrets;
mod serving;
mod simgpu_fidelity;
mod stored_memory;
mod tool;
mod toolkit;
mod unix_sockets;
mod upgrades;
mod vendors;
mod without_gpu;

use std::process::ExitCode;

use firn_lab::matrix;

fn main() -> ExitCode {
    matrix::run([
        ("bounds", bounds::suite()),
        ("conformance", conformance::suite()),
        ("connections", connections::suite()),
        ("cri", cri::suite()),
        ("crio", crio::suite()),
        ("damaged_images", damaged_images::suite()),
        ("deleted_names", deleted_names::suite()),
        ("device_free", device_free::suite()),
        ("docker", docker::suite()),
        ("doctor", doctor::suite()),
        ("faults", faults::suite()),
        ("forked_children", forked_children::suite()),
        ("gpu_choice", gpu_choice::suite()),
        ("gpu_requests", gpu_requests::suite()),
        ("guide", guide::suite()),
        ("history", history::suite()),
        ("image_privileges", image_privileges::suite()),
        ("install", install::suite()),
        ("interposed", interposed::suite()),
        ("job_hooks", job_hooks::suite()),
        ("killed_restores", killed_restores::suite()),
        ("leaks", leaks::suite()),
        ("listing", listing::suite()),
        ("moves", moves::suite()),
        ("nerdctl", nerdctl::suite()),
        ("objects", objects::suite()),
        ("package", package::suite()),
        ("pauses", pauses::suite()),
        ("podman", podman::suite()),
        ("ranks", ranks::suite()),
        ("recovery", recovery::suite()),
        ("refusals", refusals::suite()),
        ("remaps", remaps::suite()),
        ("remote_stores", remote_stores::suite()),
        ("responsive", responsive::suite()),
        ("restarts", restarts::suite()),
        ("restore_failures", restore_failures::suite()),
        ("restore_mounts", restore_mounts::suite()),
        ("secrets", secrets::suite()),
        ("serving", serving::suite()),
        ("simgpu_fidelity", simgpu_fidelity::suite()),
        ("stored_memory", stored_memory::suite()),
        ("tool", tool::suite()),
        ("toolkit", toolkit::suite()),
        ("unix_sockets", unix_sockets::suite()),
        ("upgrades", upgrades::suite()),
        ("vendors", vendors::suite()),
        ("without_gpu", without_gpu::suite()),
    ])
}
