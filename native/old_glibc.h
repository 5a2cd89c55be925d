/* Included before every source file. The libraries are loaded into containers of any image, so they must not need
 * any symbol of the C library that is newer than version 2.17, whichever version they are linked against. The
 * functions below have a newer version in later C libraries (most moved into libc.so), but every later C library
 * still has the old one. Functions that 2.17 does not have (fstat as a function, memfd_create) are replaced by
 * system calls. */
#ifndef COTENANT_OLD_GLIBC_H
#define COTENANT_OLD_GLIBC_H

#ifdef __x86_64__
#define OLD(name) __asm__(".symver " #name ", " #name "@GLIBC_2.2.5")
OLD(dladdr);
OLD(dlerror);
#ifndef COTENANT_DLOPEN /* the shim defines its own dlsym, so the old version of dlsym is not chosen for it */
OLD(dlopen);
OLD(dlsym);
#endif
OLD(dlvsym);
OLD(pthread_create);
OLD(pthread_detach);
OLD(pthread_join);
OLD(pthread_key_create);
OLD(pthread_mutex_trylock);
OLD(pthread_once);
OLD(pthread_setspecific);
OLD(pthread_sigmask);
__asm__(".symver pthread_setname_np, pthread_setname_np@GLIBC_2.12");
#undef OLD
#endif

#endif
