//! One GPU as this crate uses it: its context, one stream for everything, and the few properties that launch shapes
//! depend on. Never panics where a driver is missing.

use std::{collections::BTreeSet, sync::Arc};

use cudarc::driver::{
    CudaContext, CudaSlice, CudaStream, CudaView, DeviceRepr, ValidAsZeroBits, result,
    sys::{self, CUdevice_attribute as Attribute},
};

use crate::{error::KernelError, mark::Mark};

/// The CUDA version that kernels and bindings are made for.
const DRIVER_VERSION_MIN: i32 = 13_000;

/// A buffer of so many bytes is large. The driver gives memory in pieces of 2 MiB, and less is lost of one the larger it is.
const LARGE_BYTES: usize = 32 << 20;

/// An opened GPU.
#[derive(Clone, Debug)]
pub struct Device {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    properties: Properties,
}

/// What launch shapes depend on.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Properties {
    /// Multiprocessors.
    pub n_multiprocessors: u32,
    /// Compute capability, e.g. (9, 0).
    pub capability: (i32, i32),
    /// Bytes of the L2 cache.
    pub l2_bytes: usize,
    /// Shared memory that a block may ask for.
    pub shared_bytes_max: u32,
}

/// What GPUs reach each other's memory over.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Link {
    /// What a warp stores to a line of 128 bytes is seen whole.
    NvLink,
    /// What a thread stores to 8 bytes is.
    Pcie,
}

impl Device {
    /// Opens the GPU `ordinal`. All work of this crate goes to one stream of it, in order: the context's own tracking of
    /// buffers by events is switched off, because a stream under capture cannot wait for it.
    pub fn open(ordinal: usize) -> Result<Self, KernelError> {
        driver_version()?;
        let context = CudaContext::new(ordinal).map_err(|source| KernelError::NoDevice { ordinal, source })?;
        // SAFETY: nothing has been allocated yet, and buffers are used on the one stream below; whoever adds a stream
        // orders it by events of his own.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(KernelError::driver("create a stream"))?;
        let properties = Properties::read(&context)?;
        Ok(Self { context, stream, properties })
    }

    /// How many GPUs the driver finds.
    pub fn count() -> Result<usize, KernelError> {
        driver_version()?;
        let n = CudaContext::device_count().map_err(KernelError::driver("count GPUs"))?;
        Ok(n.unsigned_abs() as usize)
    }

    /// Opens GPUs that read and write each other's memory: whatever is allocated on one of them from now on. Allocating there may wait
    /// until the others are idle, so nothing is allocated while kernels of theirs wait for this one.
    pub fn open_group(ordinals: &[usize]) -> Result<(Vec<Self>, Link), KernelError> {
        let devices = ordinals.iter().map(|ordinal| Self::open(*ordinal)).collect::<Result<Vec<_>, _>>()?;
        for (owner, device) in ordinals.iter().zip(&devices) {
            let others: BTreeSet<usize> = ordinals.iter().copied().filter(|other| other != owner).collect();
            device.share_memory_with(*owner, &others)?;
        }
        let pairs = ordinals.iter().flat_map(|a| ordinals.iter().map(move |b| [*a, *b])).filter(|[a, b]| a != b);
        let links = pairs.map(link).collect::<Result<Vec<_>, _>>()?;
        let link = if links.iter().all(|link| *link == Link::NvLink) { Link::NvLink } else { Link::Pcie };
        Ok((devices, link))
    }

    /// Opens GPUs of stages, those of each as a group. Copies between stages go over the link where it lets them through, else by way of the
    /// host.
    pub fn open_stages(stages: &[Vec<usize>]) -> Result<Vec<(Vec<Self>, Link)>, KernelError> {
        let opened = stages.iter().map(|ordinals| Self::open_group(ordinals)).collect::<Result<Vec<_>, _>>()?;
        for ((devices, _), own) in opened.iter().zip(stages) {
            let others = || stages.iter().filter(|other| *other != own).flatten().copied();
            for (device, ordinal) in devices.iter().zip(own) {
                let reaching = others().map(|other| Ok((other, device.lets_in(*ordinal, other)?)));
                let reaching = reaching.collect::<Result<Vec<_>, KernelError>>()?;
                let reaching = reaching.into_iter().filter_map(|(other, can)| can.then_some(other)).collect();
                device.share_memory_with(*ordinal, &reaching)?;
            }
        }
        Ok(opened)
    }

    /// Whether another GPU can be let into what is allocated here.
    fn lets_in(&self, own: usize, other: usize) -> Result<bool, KernelError> {
        let failed = KernelError::driver("ask whether a GPU reaches another one's memory");
        let handle = |ordinal: usize| result::device::get(i32::try_from(ordinal).expect("GPUs are few"));
        let (own, other) = (handle(own).map_err(&failed)?, handle(other).map_err(&failed)?);
        let mut can = 0;
        // SAFETY: writes one integer; both handles are valid.
        unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, other, own) }.result().map_err(&failed)?;
        Ok(can != 0 && self.context.has_async_alloc())
    }

    /// Lets other GPUs into what is allocated here. Buffers come from the device's default pool.
    fn share_memory_with(&self, own: usize, others: &BTreeSet<usize>) -> Result<(), KernelError> {
        let failed = KernelError::driver("share a GPU's memory with others");
        let device = result::device::get(i32::try_from(own).expect("GPUs are few")).map_err(&failed)?;
        let mut granted = Vec::new();
        for other in others {
            if !self.lets_in(own, *other)? {
                return Err(KernelError::NoPeerAccess { from: *other, to: own });
            }
            // SAFETY: a C struct of integers, a union of them included; all zeros is a value of it.
            let mut access: sys::CUmemAccessDesc = unsafe { std::mem::zeroed() };
            access.location = device_location(*other);
            access.flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
            granted.push(access);
        }
        if granted.is_empty() {
            return Ok(());
        }
        // SAFETY: the pool is the device's own; the descriptions live until the call returns.
        unsafe {
            let pool = result::device::get_mem_pool(device).map_err(&failed)?;
            sys::cuMemPoolSetAccess(pool, granted.as_ptr(), granted.len()).result().map_err(&failed)
        }
    }

    /// The stream that all launches go to.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// The context, for memory queries and further streams.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// What launch shapes depend on.
    pub fn properties(&self) -> Properties {
        self.properties
    }

    /// A buffer of zeros.
    pub fn zeros<T: DeviceRepr + ValidAsZeroBits>(&self, len: usize) -> Result<CudaSlice<T>, KernelError> {
        self.stream.alloc_zeros(len).map_err(KernelError::driver("allocate device memory"))
    }

    /// A buffer of zeros that no other GPU reads; see [`Self::own_unset`].
    pub fn own_zeros<T: DeviceRepr + ValidAsZeroBits>(&self, len: usize) -> Result<CudaSlice<T>, KernelError> {
        let mut zeros = self.own_unset(len)?;
        self.stream.memset_zeros(&mut zeros).map_err(KernelError::driver("allocate device memory"))?;
        Ok(zeros)
    }

    /// A buffer whose every value is written before it is read, and that no other GPU reads. A large one lies outside of the pool, which is
    /// mapped for all GPUs of a group: the driver maps 96 GB of a pool in 137 ms, and of these in 11 (64 buffers, one H200).
    pub fn own_unset<T: DeviceRepr + ValidAsZeroBits>(&self, len: usize) -> Result<CudaSlice<T>, KernelError> {
        if len * size_of::<T>() < LARGE_BYTES {
            return self.unset(len);
        }
        let failed = KernelError::driver("allocate device memory");
        self.context.bind_to_thread().map_err(&failed)?;
        // SAFETY: memory of as many numbers, of which any bits are some, and which nobody else has; it is freed by its owner as the
        // pool's is, which the driver takes.
        unsafe {
            let address = result::malloc_sync(len * size_of::<T>()).map_err(&failed)?;
            Ok(self.stream.upgrade_device_ptr::<T>(address, len))
        }
    }

    /// A buffer whose every value is written before it is read.
    pub fn unset<T: DeviceRepr + ValidAsZeroBits>(&self, len: usize) -> Result<CudaSlice<T>, KernelError> {
        // SAFETY: numbers, of which any bits are some.
        unsafe { self.stream.alloc(len) }.map_err(KernelError::driver("allocate device memory"))
    }

    /// A buffer with these values.
    pub fn holding<T: DeviceRepr>(&self, values: &[T]) -> Result<CudaSlice<T>, KernelError> {
        self.stream.clone_htod(values).map_err(KernelError::driver("copy to the device"))
    }

    /// Values as everything launched so far leaves them; waits for it.
    pub fn held<T: DeviceRepr>(&self, values: &CudaView<'_, T>) -> Result<Vec<T>, KernelError> {
        let values = self.stream.clone_dtoh(values).map_err(KernelError::driver("copy from the device"))?;
        self.synchronize()?;
        Ok(values)
    }

    /// Bytes of its memory that nobody uses, and all.
    pub fn memory(&self) -> Result<(usize, usize), KernelError> {
        self.context.mem_get_info().map_err(KernelError::driver("read how much memory is free"))
    }

    /// Waits until everything launched has run.
    pub fn synchronize(&self) -> Result<(), KernelError> {
        self.stream.synchronize().map_err(KernelError::driver("wait for the device"))
    }

    /// What is launched from here on waits until `mark` is reached, on whatever device that was set; it was set before.
    pub fn wait_for(&self, mark: &Mark) -> Result<(), KernelError> {
        self.stream.wait(mark.event()).map_err(KernelError::driver("wait for a place in another stream"))
    }

    /// Whether everything launched has run. An error may be that of any launch before.
    pub fn is_idle(&self) -> Result<bool, KernelError> {
        let failed = KernelError::driver("look whether a GPU has done its work");
        self.context.bind_to_thread().map_err(&failed)?;
        // SAFETY: the stream is open as long as the device.
        match unsafe { sys::cuStreamQuery(self.stream.cu_stream()) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => result.result().map(|()| true).map_err(failed),
        }
    }

    /// The name that the driver gives it.
    pub fn name(&self) -> Result<String, KernelError> {
        self.context.name().map_err(KernelError::driver("read the device's name"))
    }
}

/// What is between two GPUs.
fn link([a, b]: [usize; 2]) -> Result<Link, KernelError> {
    let failed = KernelError::driver("ask what is between two GPUs");
    let handle = |ordinal: usize| result::device::get(i32::try_from(ordinal).expect("GPUs are few"));
    let mut has_atomics = 0;
    // SAFETY: writes one integer; both handles are valid.
    unsafe {
        sys::cuDeviceGetP2PAttribute(
            &raw mut has_atomics,
            sys::CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED,
            handle(a).map_err(&failed)?,
            handle(b).map_err(&failed)?,
        )
    }
    .result()
    .map_err(&failed)?;
    // PCIe has no atomic operations of a GPU on another one's memory.
    Ok(if has_atomics == 1 { Link::NvLink } else { Link::Pcie })
}

fn device_location(ordinal: usize) -> sys::CUmemLocation {
    // SAFETY: as above.
    let mut location: sys::CUmemLocation = unsafe { std::mem::zeroed() };
    location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    location.id = i32::try_from(ordinal).expect("GPUs are few");
    location
}

/// The CUDA version of the driver, 13000 for 13.0; refused if it is too old. Needs no device.
pub(crate) fn driver_version() -> Result<i32, KernelError> {
    // SAFETY: only looks whether the library can be loaded.
    if !unsafe { sys::is_culib_present() } {
        return Err(KernelError::NoDriver);
    }
    let mut found = 0;
    // SAFETY: writes one integer; needs no initialisation. Every driver has this function, newer ones may be missing.
    unsafe { sys::cuDriverGetVersion(&raw mut found) }
        .result()
        .map_err(KernelError::driver("ask for the driver's version"))?;
    if found < DRIVER_VERSION_MIN {
        return Err(KernelError::DriverTooOld { found, needed: DRIVER_VERSION_MIN });
    }
    Ok(found)
}

impl Properties {
    fn read(context: &CudaContext) -> Result<Self, KernelError> {
        let read = |attribute| context.attribute(attribute).map_err(KernelError::driver("read a device attribute"));
        let capability = context.compute_capability().map_err(KernelError::driver("read the compute capability"))?;
        Ok(Self {
            n_multiprocessors: read(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.unsigned_abs(),
            capability,
            shared_bytes_max: read(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?.unsigned_abs(),
            l2_bytes: read(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?.unsigned_abs() as usize,
        })
    }
}
