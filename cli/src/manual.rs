//! `firn completions` and `firn man`: what packages have of the command line.

use anyhow::{Context, Result};
use clap::CommandFactory;

use crate::args::{Args, CompletionsArgs, ManArgs};
use crate::output;

pub fn completions(args: &CompletionsArgs) -> Result<bool> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut Args::command(), "firn", &mut text);
    output::raw(&String::from_utf8(text).context("the completions are no text")?);
    Ok(true)
}

pub fn pages(args: &ManArgs) -> Result<bool> {
    let dir = &args.dir;
    clap_mangen::generate_to(Args::command(), dir)
        .with_context(|| format!("cannot write the manual pages to {}", dir.display()))?;
    Ok(true)
}
