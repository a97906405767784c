//! Functions of the objects that the program has loaded, without the C library's own search.

use core::cell::UnsafeCell;
use core::ffi::{CStr, c_char, c_int, c_void};
use core::mem::{MaybeUninit, transmute};
use core::sync::atomic::{AtomicU8, Ordering};
use core::{iter, ptr};

use crate::arch;

/// What the loader keeps for debuggers.
#[repr(C)]
pub struct Debug {
    version: c_int,
    first: *const Loaded,
}

/// An object in the loader's list.
#[repr(C)]
struct Loaded {
    base: usize,
    name: *const c_char,
    dynamic: *const Entry,
    next: *const Loaded,
}

/// Of the program headers that `dl_iterate_phdr` shows.
#[repr(C)]
struct Header {
    kind: u32,
    flags: u32,
    offset: u64,
    address: u64,
    physical: u64,
    file_size: u64,
    memory_size: u64,
    alignment: u64,
}

/// The begin of what `dl_iterate_phdr` shows of an object.
#[repr(C)]
struct Listed {
    base: usize,
    name: *const c_char,
    headers: *const Header,
    count: u16,
}

#[repr(C)]
struct Entry {
    tag: i64,
    value: usize,
}

#[repr(C)]
struct Symbol {
    name: u32,
    info: u8,
    other: u8,
    section: u16,
    value: usize,
    size: u64,
}

type Callback = unsafe extern "C" fn(*const Listed, usize, *mut c_void) -> c_int;
type Iterate = unsafe extern "C" fn(Callback, *mut c_void) -> c_int;

const DYNAMIC: u32 = 2;
const END: i64 = 0;
const STRINGS: i64 = 5;
const SYMBOLS: i64 = 6;
const GNU_HASH: i64 = 0x6fff_fef5;
const FUNCTION: u8 = 2;

/// A loaded object with a table of symbols.
#[derive(Clone, Copy)]
pub struct Object {
    base: usize,
    name: *const c_char,
    strings: *const c_char,
    symbols: *const Symbol,
    hash: *const u32,
}

/// An object that stays loaded, once it was found.
pub struct Known {
    object: UnsafeCell<MaybeUninit<Object>>,
    /// 0: not found yet; 1: a thread writes it down; 2: found.
    state: AtomicU8,
}

// SAFETY: one thread writes the object, before `state` shows it to others, and nobody writes it again.
unsafe impl Sync for Known {}

impl Known {
    pub const fn new() -> Self {
        Self {
            object: UnsafeCell::new(MaybeUninit::uninit()),
            state: AtomicU8::new(0),
        }
    }

    pub fn get(&self) -> Option<Object> {
        let is_found = self.state.load(Ordering::Acquire) == 2;
        // SAFETY: it was written before the state.
        is_found.then(|| unsafe { (*self.object.get()).assume_init() })
    }

    pub fn set(&self, object: Object) {
        let first = self
            .state
            .compare_exchange(0, 1, Ordering::Relaxed, Ordering::Relaxed);
        if first.is_ok() {
            // SAFETY: this thread alone has changed the state from 0.
            unsafe { (*self.object.get()).write(object) };
            self.state.store(2, Ordering::Release);
        }
    }
}

/// The loaded objects, in the order in which the loader has come to them. Those of the program's begin come
/// first and stay; who looks further does so while others load and unload.
fn listed() -> impl Iterator<Item = Object> {
    // SAFETY: the loader's list ends with null.
    let first = arch::debug().and_then(|debug| unsafe { debug.first.as_ref() });
    // SAFETY: as above.
    let loaded = iter::successors(first, |loaded| unsafe { loaded.next.as_ref() });
    // SAFETY: the loader describes its objects.
    loaded.filter_map(|loaded| unsafe { Object::of(loaded.base, loaded.name, loaded.dynamic) })
}

/// The first object after this library that exports a function, and that function: what the program would
/// have without this library.
pub fn next(name: &[u8]) -> Option<(Object, usize)> {
    let others = listed().skip_while(|object| !object.is_own()).skip(1);
    others
        .filter_map(|object| Some((object, object.function(name)?)))
        .next()
}

/// A function of the C library.
pub fn of_libc(name: &[u8]) -> Option<usize> {
    listed()
        .filter(Object::is_libc)
        .find_map(|object| object.function(name))
}

/// The first loaded object for which `wanted` returns something, and what that is.
pub fn first<T, F: FnMut(&Object) -> Option<T>>(wanted: F) -> Option<T> {
    struct Search<T, F>(F, Option<T>);

    unsafe extern "C" fn look<T, F: FnMut(&Object) -> Option<T>>(
        shown: *const Listed,
        _: usize,
        data: *mut c_void,
    ) -> c_int {
        // SAFETY: the C library shows a valid object, and `data` is the search below.
        let (shown, search) = unsafe { (&*shown, &mut *data.cast::<Search<T, F>>()) };
        // SAFETY: as shown by the C library.
        let object = unsafe { Object::of(shown.base, shown.name, shown.dynamic()) };
        search.1 = object.and_then(|object| (search.0)(&object));
        search.1.is_some().into()
    }

    let iterate = of_libc(b"dl_iterate_phdr")?;
    let mut search = Search(wanted, None);
    // SAFETY: it is the C library's function, and the callback gets the search, which outlives the call.
    unsafe {
        let iterate = transmute::<usize, Iterate>(iterate);
        iterate(look::<T, F>, (&raw mut search).cast());
    }
    search.1
}

impl Listed {
    /// # Safety
    /// The C library shows it.
    unsafe fn dynamic(&self) -> *const Entry {
        let headers = 0..usize::from(self.count);
        // SAFETY: there are `count` headers.
        let mut headers = headers.map(|index| unsafe { &*self.headers.add(index) });
        let dynamic = headers.find(|header| header.kind == DYNAMIC);
        dynamic.map_or(ptr::null(), |header| {
            self.base.wrapping_add(header.address as usize) as *const Entry
        })
    }
}

impl Object {
    /// # Safety
    /// The object is loaded, and these are its.
    unsafe fn of(base: usize, name: *const c_char, dynamic: *const Entry) -> Option<Self> {
        if dynamic.is_null() {
            return None;
        }
        let mut object = Self {
            base,
            name,
            strings: ptr::null(),
            symbols: ptr::null(),
            hash: ptr::null(),
        };
        let mut entry = dynamic;
        // SAFETY: the dynamic section ends with an entry of tag 0.
        while unsafe { (*entry).tag } != END {
            // SAFETY: as above.
            let Entry { tag, value } = unsafe { &*entry };
            // glibc has replaced offsets by addresses here, musl has not.
            let at = if *value < base {
                value.wrapping_add(base)
            } else {
                *value
            };
            match *tag {
                STRINGS => object.strings = at as *const c_char,
                SYMBOLS => object.symbols = at as *const Symbol,
                GNU_HASH => object.hash = at as *const u32,
                _ => {}
            }
            // SAFETY: it was not the last one.
            entry = unsafe { entry.add(1) };
        }
        let has_all = !object.strings.is_null() && !object.symbols.is_null() && !object.hash.is_null();
        has_all.then_some(object)
    }

    /// Its file, as the loader has it: a string.
    pub fn file(&self) -> *const c_char {
        self.name
    }

    /// Whether it is this library.
    fn is_own(&self) -> bool {
        self.function(b"dlsym") == Some(arch::dlsym as *const () as usize)
    }

    /// Whether it is the C library, or the part of it that loads objects.
    pub fn is_libc(&self) -> bool {
        let names: [&[u8]; 5] = [
            b"libc.so",
            b"libdl.so",
            b"libpthread.so",
            b"ld-musl-",
            b"libc.musl-",
        ];
        names.iter().any(|name| self.name().starts_with(name))
    }

    /// The name of its file, without directories.
    pub fn name(&self) -> &[u8] {
        if self.name.is_null() {
            return &[];
        }
        // SAFETY: the loader's name of a loaded object ends with 0.
        let name = unsafe { CStr::from_ptr(self.name) }.to_bytes();
        name.rsplit(|byte| *byte == b'/').next().unwrap_or(name)
    }

    /// The address of a function that it exports.
    pub fn function(&self, name: &[u8]) -> Option<usize> {
        // SAFETY: the object is loaded, so its tables are as the format has them: the hash table begins with
        // the numbers of buckets, of the first symbol, of words of the filter, and a shift; then filter,
        // buckets, chains.
        unsafe {
            let buckets = *self.hash as usize;
            let first = *self.hash.add(1) as usize;
            let words = *self.hash.add(2) as usize;
            let table = self.hash.add(4 + 2 * words);
            let hash = gnu_hash(name);
            let mut index = *table.add((hash as usize).checked_rem(buckets)?) as usize;
            if index < first {
                return None;
            }
            loop {
                let chain = *table.add(buckets + index - first);
                let symbol = &*self.symbols.add(index);
                let is_called = || CStr::from_ptr(self.strings.add(symbol.name as usize)).to_bytes() == name;
                if chain | 1 == hash | 1 && symbol.section != 0 && symbol.info & 15 == FUNCTION && is_called()
                {
                    return Some(self.base.wrapping_add(symbol.value));
                }
                if chain & 1 == 1 {
                    return None;
                }
                index += 1;
            }
        }
    }
}

fn gnu_hash(name: &[u8]) -> u32 {
    let add = |hash: u32, byte: &u8| hash.wrapping_mul(33).wrapping_add(u32::from(*byte));
    name.iter().fold(5381, add)
}
