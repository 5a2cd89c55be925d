/* Included before every source: the libraries are loaded into containers of any image, so they may not need any C
 * library symbol newer than version 2.17, whatever they are linked against.  These functions moved into libc.so or
 * changed in small ways since; their old versions exist in all later libraries.  What 2.17 does not have (fstat as a
 * function, memfd_create) is done by system call. */
#ifndef COTENANT_OLD_GLIBC_H
#define COTENANT_OLD_GLIBC_H

#ifdef __x86_64__
#define OLD(name) __asm__(".symver " #name ", " #name "@GLIBC_2.2.5")
OLD(dladdr);
OLD(dlerror);
#ifndef COTENANT_DLOPEN /* the shim defines its own */
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
