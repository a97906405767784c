//! Copies memory of stopped processes for the shim, in a process of its own: threads and buffers end with it.

use std::io::{Read, stdin};

use anyhow::{Context, Result};
use firn_host::{Problem, ProblemReport};
use firn_image::memory::MemoryError;
use firn_image::memory::call::{Order, Request, complete, filled, kept, ready, saved};
use firn_image::memory::progress::showing;
use serde::Serialize;

/// Longest request that is read.
const REQUEST: u64 = 16 << 20;

/// Does what standard input asks for, and prints the result.
pub fn run() -> Result<()> {
    let mut request = Vec::new();
    stdin().take(REQUEST).read_to_end(&mut request)?;
    let Order { request, shown } =
        serde_json::from_slice(&request).context("the request is not understood")?;
    showing(shown.as_ref(), |counter| match request {
        Request::Ready(make) => answer(ready(&make)),
        Request::Save(save) => answer(saved(save, counter)),
        Request::Rest(rest) => answer(kept(&rest, counter)),
        Request::Look(stored) => answer(complete(&stored).map(|_| ())),
        Request::Fill(fill) => answer(filled(&fill, counter)),
    })
}

fn answer<T: Serialize>(done: Result<T, MemoryError>) -> Result<()> {
    let done: Result<T, ProblemReport> = done.map_err(|error| error.report());
    super::answer(serde_json::to_string(&done)?)
}
