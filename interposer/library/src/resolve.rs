//! From a name to the driver's function, and to what stands before it.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::mem::transmute;
use core::sync::atomic::{AtomicUsize, Ordering};

use firn_interposer::facts::{self, ROWS, Stream};

use crate::calls::WRAPPERS;
use crate::elf::{self, Known, Object};

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;
type Dlopen = unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void;

/// Of `dlsym`: the next object after the caller's.
const RTLD_NEXT: usize = usize::MAX;
const RTLD_NOW: c_int = 2;

/// The flag of cuGetProcAddress for functions that take the thread's own default stream.
const PER_THREAD: u64 = 2;

/// The `dlsym` that the program would have without this library; 0: not looked for yet.
static DLSYM: AtomicUsize = AtomicUsize::new(0);

/// What has that `dlsym`, if it is not the C library: another library that stands before libcuda. The
/// driver's functions that it exports are called instead of the driver's, as without this library.
static OTHER: Known = Known::new();

static DRIVER: Known = Known::new();

/// libcuda, if it is loaded. It stays loaded from then on.
fn driver() -> Option<Object> {
    if let Some(known) = DRIVER.get() {
        return Some(known);
    }
    let found = elf::first(|object| object.name().starts_with(b"libcuda.so").then_some(*object))?;
    open(found.file())?;
    DRIVER.set(found);
    Some(found)
}

pub fn has_driver() -> bool {
    driver().is_some()
}

/// Loads an object, or takes a reference on one that is loaded. None: the C library cannot.
fn open(file: *const c_char) -> Option<()> {
    let dlopen = elf::of_libc(b"dlopen")?;
    // SAFETY: it is the C library's function, and `file` is a string.
    let opened = unsafe { transmute::<usize, Dlopen>(dlopen)(file, RTLD_NOW) };
    (!opened.is_null()).then_some(())
}

fn next_dlsym() -> Option<Dlsym> {
    let mut address = DLSYM.load(Ordering::Acquire);
    if address == 0 {
        let (object, found) = elf::next(b"dlsym")?;
        if !object.is_libc() {
            OTHER.set(object);
        }
        DLSYM.store(found, Ordering::Release);
        address = found;
    }
    // SAFETY: it is a function of this name.
    Some(unsafe { transmute::<usize, Dlsym>(address) })
}

/// The function of a row that the program would call, where libcuda is loaded and has it.
fn loaded(row: usize) -> Option<usize> {
    let symbol = ROWS.get(row)?.symbol.as_bytes();
    let real = driver()?.function(symbol)?;
    next_dlsym()?;
    let other = OTHER.get().and_then(|other| other.function(symbol));
    Some(other.unwrap_or(real))
}

/// As [`loaded`]. It loads libcuda if the program has not.
pub fn exported(row: usize) -> Option<usize> {
    if !has_driver() {
        open(c"libcuda.so.1".as_ptr())?;
    }
    loaded(row)
}

/// What `dlsym` does: `jump` is where it continues with its arguments; else it returns `answer`.
#[repr(C)]
pub struct Answer {
    answer: *mut c_void,
    jump: *const c_void,
}

/// Decides for a call of `dlsym`.
///
/// # Safety
/// `name` is a string, or null.
pub unsafe extern "C" fn answer(handle: *mut c_void, name: *const c_char) -> Answer {
    let null = Answer {
        answer: core::ptr::null_mut(),
        jump: core::ptr::null(),
    };
    let Some(real) = next_dlsym() else {
        return null;
    };
    let untouched = Answer {
        jump: real as *const c_void,
        ..null
    };
    if name.is_null() || handle as usize == RTLD_NEXT {
        return untouched;
    }
    // SAFETY: the caller gives a string.
    let Some(row) = facts::of_symbol(unsafe { CStr::from_ptr(name) }.to_bytes()) else {
        return untouched;
    };
    // Before the answer, whose `dlerror` this may change.
    let driver = loaded(row);
    // SAFETY: as the caller would do it. No handle but RTLD_NEXT means the caller.
    let found = unsafe { real(handle, name) };
    let wrapper = WRAPPERS.get(row).map_or(0, |wrapper| wrapper.get());
    let is_wrapper = found as usize == wrapper;
    match driver {
        Some(driver) if found as usize == driver || is_wrapper => Answer {
            answer: wrapper as *mut c_void,
            ..null
        },
        // Found here alone: a program that looks whether there is a driver must not believe it.
        None if is_wrapper => Answer {
            // SAFETY: as above. There is no such name, so that `dlerror` has a message.
            answer: unsafe { real(handle, c"firn: libcuda is not loaded".as_ptr()) },
            ..null
        },
        _ => Answer {
            answer: found,
            ..null
        },
    }
}

/// Replaces the driver's function that cuGetProcAddress has found by this library's, and returns the result
/// of that call.
pub fn replaced(result: i32, name: u64, to: u64, version: u32, flags: u64) -> i32 {
    let (name, to) = (name as *const c_char, to as *mut usize);
    if result != 0 || name.is_null() || to.is_null() {
        return result;
    }
    // SAFETY: the driver has read the name, and has written there.
    let (name, found) = unsafe { (CStr::from_ptr(name).to_bytes(), &mut *to) };
    let stream = if flags & PER_THREAD == 0 {
        Stream::Legacy
    } else {
        Stream::PerThread
    };
    let Some(row) = facts::of_request(name, version, stream) else {
        return result;
    };
    if loaded(row) == Some(*found)
        && let Some(wrapper) = WRAPPERS.get(row)
    {
        *found = wrapper.get();
    }
    result
}
