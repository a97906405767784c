//! firn-hook: the program that runs in a container's namespaces, or that parses YAML, on behalf of firn.
//!
//! The OCI runtime runs it as a hook, CRIU as its action script, and the shim as a child process.
#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

/// Prints a line to standard error, for people. It may quote what images and containers have written.
macro_rules! report {
    ($($text:tt)*) => {
        // A failure to print cannot be reported.
        drop(firn_config::text::write_line(std::io::stderr().lock(), format_args!($($text)*)))
    };
}

#[cfg(test)]
mod alone;
mod call;
mod cap;
mod checkpoint_image;
mod convert;
mod image;
mod killed_criu;
mod late;
mod layer;
mod libraries;
mod loopback;
mod memory;
mod netlink;
mod network;
mod replay;
mod rights;
mod rootfs;
mod script;
mod shm;
mod soname;
mod state;

#[cfg(test)]
#[expect(clippy::print_stdout, reason = "the last one that is shown has failed")]
#[path = "../../fuzz/kept.rs"]
mod kept;

use std::fmt::Display;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use firn_config::names;
use firn_oci::Spec;
use nix::sys::stat::{Mode, umask};

use rootfs::Rootfs;
use state::State;

const HELP: &str = "\
firn-hook: run by OCI runtimes, CRIU and the shim, and not by people

usage: firn-hook COMMAND

OCI hooks, which read the container's state from standard input:
  createRuntime      brings up the loopback interface of a restored container's
                     own network namespace
  createContainer    makes links and entries of /etc/ld.so.cache for the libraries
                     of NVIDIA's driver that are mounted one by one; never fails
  create-symlinks [--link TEXT::PATH]...
                     makes symbolic links in the container's root file system
  update-ldcache [--library PATH]...
                     adds libraries to the container's /etc/ld.so.cache

run by the shim; results are JSON on standard output:
  convert BUNDLE [--restore] [--wrapper PATH]
                     converts the spec's GPU requests into edits, by CDI files
  call               calls a hook of the job in its container: reads what to call
                     as JSON from standard input
  end-call           ends the processes of a call whose firn-hook was killed: reads
                     that call
  library-dirs       prints the directories of the libraries in CDI files
  memory             copies memory of stopped processes: reads what to copy as JSON
                     from standard input
  replay BUNDLE      makes what createContainer hooks make, for a restore
  apply-layer ROOT ARCHIVE CAP
                     unpacks the files that a container had written, at most so
                     many bytes; prints how many device nodes were left out
  unpack-image STORE DIGEST DIR CAP
                     unpacks a checkpoint that is an image in containerd's content
                     store into a new directory, at most so many bytes; prints
                     how many of them are left
  keep-layer BUNDLE ARCHIVE
                     archives the files that the container has written
  keep-shm           archives the files in a pod's /dev/shm: reads of which pod as
                     JSON from standard input
  fill-shm           makes archived files in the /dev/shm of a copy's pod, and
                     records which: reads where as JSON from standard input
  empty-shm          removes them again: reads the same
  check-image BUNDLE IMAGE
                     prints what in CRIU's files exceeds the spec, or null
  check-tasks BUNDLE INIT [PID]...
                     prints what in restored processes exceeds it, or null
  release BUNDLE RUN [PID]...
                     ends what a CRIU that was killed in a dump has left: TCP
                     connections that hang, rules of the packet filter, links

Without a command it is CRIU's action script: it replaces the GPU nodes in the
container's /dev by those of the spec, and in a dump it does what keep-shm does.
Everything is safe to repeat.

exit status: 0 done or nothing to do, 1 failed, 2 wrong usage";

fn main() -> ExitCode {
    // Files in the container are for all of its users, whatever the runtime's umask is.
    umask(Mode::from_bits_truncate(0o022));
    let arguments: Vec<String> = std::env::args_os()
        .skip(1)
        .map(|argument| argument.to_string_lossy().into_owned())
        .collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match run(&words) {
        Some(Ok(code)) => code,
        Some(Err(error)) => {
            report!("firn-hook: {error:#}");
            ExitCode::FAILURE
        }
        None => {
            report!("firn-hook: wrong usage. hint: firn-hook --help");
            ExitCode::from(2)
        }
    }
}

/// Runs the command; none if there is no such command.
fn run(words: &[&str]) -> Option<Result<ExitCode>> {
    let done = match *words {
        ["createRuntime"] => create_runtime(),
        ["createContainer"] => {
            create_container();
            Ok(())
        }
        ["create-symlinks", ref options @ ..] => {
            let links = values(options, "--link")?;
            rootfs().and_then(|rootfs| libraries::create_symlinks(&rootfs, &links))
        }
        ["update-ldcache", ref options @ ..] => {
            let paths = values(options, "--library")?;
            rootfs().and_then(|rootfs| libraries::update_ldcache(&rootfs, &paths))
        }
        ["call"] => call::run(),
        ["end-call"] => call::end(),
        ["library-dirs"] => convert::library_dirs(),
        ["memory"] => memory::run(),
        ["apply-layer", root, archive, cap] => {
            layer::apply(Path::new(root), Path::new(archive), cap).and_then(answer)
        }
        ["unpack-image", store, digest, dir, cap] => {
            checkpoint_image::unpack(Path::new(store), digest, Path::new(dir), cap).and_then(answer)
        }
        ["keep-layer", bundle, archive] => layer::keep(Path::new(bundle), Path::new(archive)),
        ["keep-shm"] => cap::limit_process().and_then(|()| shm::keep(std::io::stdin())),
        ["fill-shm"] => cap::limit_process().and_then(|()| shm::fill(std::io::stdin())),
        ["empty-shm"] => shm::empty(std::io::stdin()),
        ["replay", bundle] => replay::run(Path::new(bundle)),
        ["check-tasks", bundle, ref pids @ ..] => image::check_tasks(Path::new(bundle), pids),
        ["release", bundle, run, ref pids @ ..] => killed_criu::release(Path::new(bundle), run, pids),
        ["check-image", bundle, image] => image::check(Path::new(bundle), Path::new(image)),
        ["convert", bundle, ref options @ ..] => {
            let (restores, options) = match options {
                ["--restore", options @ ..] => (true, options),
                options => (false, options),
            };
            let wrapper = match options {
                [] => None,
                ["--wrapper", wrapper] => Some(Path::new(*wrapper)),
                _ => return None,
            };
            return Some(convert::run(Path::new(bundle), wrapper, restores));
        }
        ["--version" | "-V"] => answer(concat!("firn-hook ", env!("CARGO_PKG_VERSION"))),
        ["--help" | "-h"] => answer(HELP),
        [] => script::run(&std::env::var(names::ENV_CRIU_ACTION).ok()?),
        _ => return None,
    };
    Some(done.map(|()| ExitCode::SUCCESS))
}

/// Prints a line to standard output, unchanged.
fn answer(line: impl Display) -> Result<()> {
    writeln!(std::io::stdout(), "{line}").context("cannot write to standard output")
}

fn create_runtime() -> Result<()> {
    loopback::bring_up(State::read(std::io::stdin())?.pid()?)
}

/// Never fails: podman and CRI-O run this hook for every container and do not start one whose hook fails.
fn create_container() {
    let provide = || {
        let state = State::read(std::io::stdin())?;
        let bundle = state.bundle()?;
        libraries::provide(bundle, &Spec::load(bundle)?)
    };
    if let Err(error) = provide() {
        report!("firn-hook: programs of the container may not find the driver's libraries: {error:#}");
    }
}

fn rootfs() -> Result<Rootfs> {
    Rootfs::open(&State::read(std::io::stdin())?.rootfs()?)
}

/// The values of an option that may be given several times; none if there are other options.
fn values(options: &[&str], name: &str) -> Option<Vec<String>> {
    let pairs = options.chunks(2).map(|pair| match pair {
        [option, value] if *option == name => Some((*value).to_owned()),
        _ => None,
    });
    pairs.collect()
}
