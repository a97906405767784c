//! Timers in an image that was just made, with which a restored container would wait for ever.
//!
//! The kernel starts a periodic timerfd that has expired again when it is read, and shows no time until its
//! next expiration before. CRIU writes down that there is none, and a restore starts the timer with that: it
//! never expires again. A container that stands still longer than the interval of its timer, for its dump or
//! the copy of its GPU memory, has such a timer. Here it gets the least time: the timer has expired at the
//! restore, as it had at the dump.

use std::borrow::Cow;
use std::path::Path;

use super::connections::write;
use super::files::{MAGIC, NAME};
use super::wire::{self, Message, WireError};
use super::{Image, ImageFault, messages, missing};

/// The field of a timerfd in an open file.
const TIMER: u32 = 12;

/// Fields of `timerfd_entry`. Times are seconds and nanoseconds.
mod field {
    pub(super) const EXPIRATIONS: u32 = 5;
    pub(super) const LEFT: [u32; 2] = [7, 8];
    pub(super) const INTERVAL: [u32; 2] = [9, 10];
}

/// Sets the timers in the image at `dir` that a restore would leave dead, and returns how many there are.
/// Nobody else may write to `dir`.
///
/// # Errors
/// The list of open files is not as CRIU writes it, or cannot be read or written.
pub fn set_expired_timers(dir: &Path) -> Result<usize, ImageFault> {
    let image = Image::open(dir)?;
    let bytes = image.bytes(NAME)?.ok_or_else(|| missing(NAME))?;
    let malformed = |error: WireError| ImageFault::malformed(NAME, error);
    let mut edited = Vec::new();
    for file in messages(NAME, MAGIC, &bytes)? {
        edited.push(match expired(file).map_err(malformed)? {
            Some(timer) => Cow::Owned(set(file, timer).map_err(malformed)?),
            None => Cow::Borrowed(file),
        });
    }
    let is_set = |file: &&Cow<'_, [u8]>| matches!(file, Cow::Owned(_));
    let count = edited.iter().filter(is_set).count();
    if count > 0 {
        write(dir, NAME, MAGIC, &edited)?;
    }
    Ok(count)
}

/// The periodic timerfd that this open file is, if it has expired and was not read. One that a program has
/// stopped may have an interval too, and has not expired.
fn expired(file: &[u8]) -> Result<Option<&[u8]>, WireError> {
    let Some(bytes) = Message::parse(file)?.bytes(TIMER)? else {
        return Ok(None);
    };
    let timer = Message::parse(bytes)?;
    let is_zero = |time: [u32; 2]| {
        let [seconds, nanoseconds] = time.map(|field| timer.required_long(field));
        Ok::<_, WireError>(seconds? == 0 && nanoseconds? == 0)
    };
    let has_expired = timer.required_long(field::EXPIRATIONS)? > 0;
    let is_dead = has_expired && is_zero(field::LEFT)? && !is_zero(field::INTERVAL)?;
    Ok(is_dead.then_some(bytes))
}

/// The same open file as a timer that expires at once.
fn set(file: &[u8], timer: &[u8]) -> Result<Vec<u8>, WireError> {
    let [seconds, nanoseconds] = field::LEFT;
    let mut timer = wire::without(timer, |field| field::LEFT.contains(&field))?;
    wire::push_number(&mut timer, seconds, 0);
    wire::push_number(&mut timer, nanoseconds, 1);
    let mut file = wire::without(file, |field| field == TIMER)?;
    wire::push_bytes(&mut file, TIMER, &timer);
    Ok(file)
}

#[cfg(test)]
mod tests;
