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

mod convert;
mod image;
mod libraries;
mod loopback;
mod replay;
mod rights;
mod rootfs;
mod script;
mod soname;
mod state;

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
firn-hook: OCI hook of firn, run by runc and not by people

usage: firn-hook createRuntime < state.json
       firn-hook createContainer < state.json
       firn-hook create-symlinks [--link TEXT::PATH]... < state.json
       firn-hook update-ldcache [--library PATH]... < state.json
       firn-hook convert BUNDLE [--restore] [--wrapper PATH]
       firn-hook library-dirs
       firn-hook replay BUNDLE
       firn-hook check-image BUNDLE IMAGE
       firn-hook check-tasks BUNDLE INIT [PID]...
       firn-hook --help | --version

  createRuntime     brings up the loopback interface of the container's network
                    namespace, which runc does at create but not at restore.
                    Does nothing when the container uses the runtime's own
                    network namespace.
  createContainer   makes the links and the entries of /etc/ld.so.cache for
                    libraries of NVIDIA's driver that are mounted into the
                    container one by one. Does nothing when the container has
                    no NVIDIA GPU. Succeeds also when it cannot make them.
  create-symlinks   makes symbolic links in the container's root file system,
                    and the directories that they need. What exists and is no
                    link stays.
  update-ldcache    adds libraries to the container's /etc/ld.so.cache, before
                    others of the same name.

  without arguments it is CRIU's action script, which CRIU calls at a restore
  by a link in the bundle: before CRIU opens files again, firn-hook replaces
  the GPU nodes in the container's /dev by those of the bundle's spec.

  convert           converts GPUs that a hook or a name in the bundle's spec
                    requests into edits of the spec, by the node's CDI files.
                    Run by the shim. Prints one JSON object. --wrapper is
                    NVIDIA's wrapper of runc, whose configuration decides
                    which requests count.

  library-dirs      prints the directories from which the node's CDI files mount
                    libraries, as a JSON list. Run by the shim.
  replay            makes, in the root file system of a bundle that is to be restored,
                    the links and the cache entries that its createContainer
                    hooks make: runc runs none of these at a restore. Run by the
                    shim. Knows firn's and NVIDIA's.
  check-image       compares CRIU's files in the directory IMAGE with the bundle's
                    spec. Run by the shim before a restore. Prints what exceeds the
                    spec, as a JSON object, or null.
  check-tasks       compares restored and stopped processes, of which INIT is
                    the container's first, with the bundle's spec, and prints
                    the same. Run by the shim.

All are safe to repeat. create-symlinks and update-ldcache are hooks of the
stage createContainer, and are in the CDI files of `firn cdi generate`. At
the stage poststop there is nothing to do.

The container's state, as the OCI runtime specification defines it, is read
from standard input. Errors go to standard error.

exit status: 0 done or nothing to do, 1 failed, 2 wrong usage
";

fn main() -> ExitCode {
    // Files in the container are for all of its users, whatever the runtime's umask is.
    umask(Mode::from_bits_truncate(0o022));
    let arguments: Vec<String> = std::env::args_os()
        .skip(1)
        .map(|argument| argument.to_string_lossy().into_owned())
        .collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match words[..] {
        ["createRuntime"] => create_runtime(),
        ["createContainer"] => {
            create_container();
            Ok(())
        }
        ["create-symlinks", ref options @ ..] => {
            let Some(links) = values(options, "--link") else {
                return wrong_usage();
            };
            rootfs().and_then(|rootfs| libraries::create_symlinks(&rootfs, &links))
        }
        ["update-ldcache", ref options @ ..] => {
            let Some(paths) = values(options, "--library") else {
                return wrong_usage();
            };
            rootfs().and_then(|rootfs| libraries::update_ldcache(&rootfs, &paths))
        }
        ["library-dirs"] => convert::library_dirs(),
        ["replay", bundle] => replay::run(Path::new(bundle)),
        ["check-tasks", bundle, ref pids @ ..] => image::check_tasks(Path::new(bundle), pids),
        ["check-image", bundle, image] => image::check(Path::new(bundle), Path::new(image)),
        ["convert", bundle, ref options @ ..] => {
            let (restores, options) = match options {
                ["--restore", options @ ..] => (true, options),
                options => (false, options),
            };
            let wrapper = match options {
                [] => None,
                ["--wrapper", wrapper] => Some(Path::new(*wrapper)),
                _ => return wrong_usage(),
            };
            return convert::run(Path::new(bundle), wrapper, restores);
        }
        ["--version" | "-V"] => answer(concat!("firn-hook ", env!("CARGO_PKG_VERSION"), "\n")),
        ["--help" | "-h"] => answer(HELP),
        [] => match std::env::var(names::ENV_CRIU_ACTION) {
            Ok(action) => return script::run(&action),
            Err(_) => return wrong_usage(),
        },
        _ => return wrong_usage(),
    };
    result.map_or_else(
        |error| {
            report!("firn-hook: {error:#}");
            ExitCode::FAILURE
        },
        |()| ExitCode::SUCCESS,
    )
}

/// Prints this text to standard output, unchanged.
fn answer(text: &str) -> Result<()> {
    std::io::stdout()
        .write_all(text.as_bytes())
        .context("cannot write to standard output")
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

/// The values of an option that may be given several times; none when there are other options.
fn values(options: &[&str], name: &str) -> Option<Vec<String>> {
    let pairs = options.chunks(2).map(|pair| match pair {
        [option, value] if *option == name => Some((*value).to_owned()),
        _ => None,
    });
    pairs.collect()
}

fn wrong_usage() -> ExitCode {
    report!("firn-hook: wrong usage. hint: firn-hook --help");
    ExitCode::from(2)
}
