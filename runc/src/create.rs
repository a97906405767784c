//! `create` and `run`: the spec is edited so that the container can be checkpointed. runc creates it.

use std::collections::BTreeMap;

use firn_process::cancel::CancellationToken;
use firn_process::reaper::Reaper;
use firn_transaction::create::{Request, prepare};
use firn_transaction::recovery;
use firn_transaction::restore::NoImages;

use crate::action::CallEnd;
use crate::command_line::CommandLine;
use crate::container::{NAMESPACE, options};
use crate::error::{Failure, Trouble};

pub async fn run(line: &CommandLine, reaper: &Reaper) -> Result<CallEnd, Failure> {
    let (id, bundle) = (line.id().unwrap_or_default(), line.bundle());
    recovery::recover(&bundle).await;
    let cancel = CancellationToken::default();
    let prepared = prepare(Request {
        id,
        namespace: NAMESPACE,
        bundle: &bundle,
        options: options(line, &bundle)?,
        image: None,
        reaper,
        images: &NoImages,
        labels: Box::pin(async { BTreeMap::new() }),
        cancel: &cancel,
    });
    match prepared.await?.restore {
        None => Ok(CallEnd::Pass),
        Some(_) => Err(Trouble::Annotation { id: id.to_owned() }.into()),
    }
}
