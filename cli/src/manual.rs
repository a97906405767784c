//! `firn version`, `firn completions` and `firn man`: what packages and people have of the command line.

use anyhow::{Context, Result};
use clap::CommandFactory;
use clap_complete::Shell;
use clap_complete::env::Shells;
use firn_config::COMMIT;
use serde::Serialize;

use crate::args::{Args, CompletionsArgs, ManArgs, VersionArgs};
use crate::complete::VARIABLE;
use crate::output::{self, line, printed};

/// The program, as shells call it.
const NAME: &str = "firn";

/// zsh calls a file of its search path as a function, also for the word that is completed right now.
const ZSH: &str = "[[ ${funcstack[1]} = _firn ]] && _clap_dynamic_completer_firn \"$@\"\n";

/// What this program is.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Version {
    /// The version of the release.
    version: &'static str,
    /// The commit from which it was built; with a plus sign at its end if the sources were not as in the
    /// commit. Absent if `cargo xtask dist` has not built it.
    commit: Option<&'static str>,
}

printed! { Version: "version" }

pub fn version(args: &VersionArgs) -> Result<bool> {
    let version = env!("CARGO_PKG_VERSION");
    if args.json {
        let commit = COMMIT;
        output::json(&Version { version, commit })?;
    } else {
        line!("{NAME} {version}");
        line!("commit {}", COMMIT.unwrap_or("not known: built by hand"));
    }
    Ok(true)
}

pub fn completions(args: &CompletionsArgs) -> Result<bool> {
    let (mut text, shells) = (Vec::new(), Shells::builtins());
    let shell = shells
        .completer(&args.shell.to_string())
        .context("no such shell")?;
    shell.write_registration(VARIABLE, NAME, NAME, NAME, &mut text)?;
    if args.shell == Shell::Zsh {
        text.extend(ZSH.as_bytes());
    }
    output::raw(&String::from_utf8(text).context("the completions are no text")?);
    Ok(true)
}

pub fn pages(args: &ManArgs) -> Result<bool> {
    let dir = &args.dir;
    clap_mangen::generate_to(Args::command(), dir)
        .with_context(|| format!("cannot write the manual pages to {}", dir.display()))?;
    Ok(true)
}
